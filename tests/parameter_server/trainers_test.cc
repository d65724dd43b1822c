// SPDX-License-Identifier: Apache-2.0
// Many trainers against one owner.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/comes_true.h"
#include "tests/message_of.h"
#include "tests/parameter_server/ranks.h"
#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::parameter_server {
namespace {

using pipeline::message_of;
const base::Rank kOwner(0);

at::Tensor ones(at::IntArrayRef sizes) { return at::ones(sizes, at::kDouble).requires_grad_(true); }

// Its gradient is 1 everywhere.
Placed summing(const std::string& name, const at::Tensor& weight) {
  return {name, [weight](value::Value) -> value::Value { return weight.sum(); }, {{"weight", weight}}};
}

void iterate(Ranks& ranks, int rank, const RemoteModule& module, const RemoteOptimizer& optimizer) {
  const InContext in(ranks[rank]);
  const auto loss = called(ranks[rank], module, at::ones({1}), ranks.patience());
  ranks[rank].trainer().backward(*in.context, {loss}, {}, false, ranks.patience());
  ranks[rank].trainer().step(*in.context, optimizer, ranks.patience());
}

TEST(Trainers, UpdateOneParameterExactlyOnceForEachOfTheirSteps) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    Ranks ranks(5, seed);
    const auto weight = ones({70000}), small = ones({10});  // one step holds them one after the other
    const auto call = [weight, small](value::Value) -> value::Value { return weight.sum() + small.sum(); };
    ranks[0].place({"net", call, {{"weight", weight}, {"small", small}}});
    const auto errors = ranks.run({1, 2, 3, 4}, [&](int rank) {
      const auto net = ranks[rank].trainer().find(kOwner, "net", ranks.patience());
      const auto sgd =
          ranks[rank].trainer().make_optimizer("SGD", {1, 0, 0, 0, 0, 0}, addresses(net), ranks.patience());
      for (int i = 0; i < 25; ++i) iterate(ranks, rank, net, sgd);
    });
    for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
    EXPECT_TRUE(weight.eq(1 - 100).all().item<bool>());
    EXPECT_TRUE(small.eq(1 - 100).all().item<bool>());
    EXPECT_TRUE(comes_true([&] { return ranks[0].contexts() == 0; }));
  }
}

value::Value list(const std::vector<double>& numbers) {
  value::List list;
  for (const double number : numbers) list.items.push_back(number);
  return list;
}

TEST(Trainers, StepWithHyperParametersOfTheirOwn) {
  Ranks ranks(3);
  const auto weight = ones({3});
  ranks[0].place(summing("net", weight));
  const auto net = ranks[1].trainer().find(kOwner, "net", ranks.patience());
  const auto made = ranks[1].trainer().make_optimizer("SGD", {1, 0, 0, 0, 0, 0}, addresses(net), ranks.patience());
  auto slower = made;
  slower.hyper = list({0.25, 0, 0, 0, 0, 0});
  iterate(ranks, 1, net, slower);
  EXPECT_TRUE(weight.eq(1 - 0.25).all().item<bool>());
  iterate(ranks, 2, net, made);  // which goes on with those that it was made with
  EXPECT_TRUE(weight.eq(1 - 0.25 - 1).all().item<bool>());
  for (const auto& wrong : {std::vector<double>{1}, {-1, 0, 0, 0, 0, 0}}) {
    slower.hyper = list(wrong);
    EXPECT_THROW(iterate(ranks, 1, net, slower), value::RemoteFailure);
  }
  EXPECT_TRUE(weight.eq(1 - 0.25 - 1).all().item<bool>());
}

// A rule that stays in its update until `together` threads are in one, or time is up.
class Meets : public Updater {
 public:
  Meets(std::atomic<int>& inside, std::atomic<int>& most, int together)
      : inside_(inside), most_(most), together_(together) {}
  void update(Indices, std::span<const at::Tensor>, std::span<const at::Tensor>, const StepOptions&) override {
    most_ = std::max(most_.load(), ++inside_);
    if (together_ > 1) met = comes_true([&] { return most_ >= together_; });
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    --inside_;
  }
  bool met = true;

 private:
  std::atomic<int>&inside_, &most_;
  const int together_;
};

// Two trainers, each with an optimizer of one of `weights`; how many were in their updates at the same time.
int most_at_once(const std::vector<at::Tensor>& weights, int together) {
  Ranks ranks(3);
  std::atomic<int> inside = 0, most = 0;
  std::vector<RemoteOptimizer> optimizers(3);
  for (int rank : {1, 2}) {
    const auto& weight = weights[rank - 1];
    const auto placed = ranks[0].place(summing(base::str("net ", rank), weight));
    const auto& address = placed.parameters[0].address;
    const auto number =
        ranks[0].owned().add_optimizer({address.number}, std::make_shared<Meets>(inside, most, together));
    optimizers[rank].parts = {{kOwner, address.job, number}};
  }
  const auto errors = ranks.run({1, 2}, [&](int rank) {
    const auto net = ranks[rank].trainer().find(kOwner, base::str("net ", rank), ranks.patience());
    for (int i = 0; i < 20; ++i) iterate(ranks, rank, net, optimizers[rank]);
  });
  for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
  return most;
}

TEST(Trainers, UpdateDifferentParametersAtTheSameTime) { EXPECT_EQ(most_at_once({ones({2}), ones({2})}, 2), 2); }

TEST(Trainers, UpdateTheSameParameterOneAfterTheOtherWhateverModuleItStandsIn) {
  const auto weight = ones({2});
  EXPECT_EQ(most_at_once({weight, weight}, 1), 1);
}

TEST(Trainers, GetTheirOwnErrorsAlone) {
  Ranks ranks(3);
  const auto weight = ones({4});
  ranks[0].place(summing("good", weight));
  ranks[0].place({"bad", [](value::Value) -> value::Value { throw std::runtime_error("broken here"); }, {}});
  const auto errors = ranks.run({1, 2}, [&](int rank) {
    const auto net = ranks[rank].trainer().find(kOwner, "good", ranks.patience());
    const auto sgd = ranks[rank].trainer().make_optimizer("SGD", {1, 0, 0, 0, 0, 0}, addresses(net), ranks.patience());
    for (int i = 0; i < 10; ++i) {
      if (rank == 2) {
        const auto bad = ranks[rank].trainer().find(kOwner, "bad", ranks.patience());
        const InContext in(ranks[rank]);
        EXPECT_THROW(called(ranks[rank], bad, at::ones({1}), ranks.patience()), value::RemoteFailure);
      }
      iterate(ranks, rank, net, sgd);
    }
  });
  for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
  EXPECT_TRUE(weight.eq(1 - 20).all().item<bool>());
}

TEST(Trainers, MayBeThreadsOfOneRankEachInItsContext) {
  Ranks ranks(2);
  const auto weight = ones({4});
  ranks[0].place(summing("net", weight));
  const auto errors = ranks.run({1, 1, 1}, [&](int) {
    const auto net = ranks[1].trainer().find(kOwner, "net", ranks.patience());
    const auto sgd = ranks[1].trainer().make_optimizer("SGD", {1, 0, 0, 0, 0, 0}, addresses(net), ranks.patience());
    for (int i = 0; i < 10; ++i) iterate(ranks, 1, net, sgd);
  });
  for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
  EXPECT_TRUE(weight.eq(1 - 30).all().item<bool>());
}

// An update between a trainer's forward and its backward, by another trainer, is no error: asynchronous training.
TEST(Trainers, MayUpdateWhatAnotherOneIsInTheMiddleOf) {
  Ranks ranks(3);
  const auto weight = at::randn({3, 3}, at::kDouble).requires_grad_(true), bias = ones({3});
  ranks[0].place(linear("net", weight, bias));
  const auto input = at::randn({2, 3}, at::kDouble).requires_grad_(true);
  const auto net = ranks[1].trainer().find(kOwner, "net", ranks.patience());
  const auto sgd = ranks[1].trainer().make_optimizer("SGD", {0.1, 0, 0, 0, 0, 0}, addresses(net), ranks.patience());
  const auto errors = ranks.run({1}, [&](int) {
    const InContext in(ranks[1]);
    const auto loss = called(ranks[1], net, input, ranks.patience()).pow(2).sum();
    const auto others = ranks.run({2}, [&](int) {
      const auto sgd = ranks[2].trainer().make_optimizer("SGD", {0.1, 0, 0, 0, 0, 0}, addresses(net), ranks.patience());
      const InContext in(ranks[2]);
      const auto loss = called(ranks[2], net, input, ranks.patience()).sum();
      ranks[2].trainer().backward(*in.context, {loss}, {}, false, ranks.patience());
      ranks[2].trainer().step(*in.context, sgd, ranks.patience());
    });
    EXPECT_EQ(message_of(others[0]), "");
    ranks[1].trainer().backward(*in.context, {loss}, {}, false, ranks.patience());
    ranks[1].trainer().step(*in.context, sgd, ranks.patience());
  });
  EXPECT_EQ(message_of(errors[0]), "");
}

}  // namespace
}  // namespace lamina::parameter_server
