// SPDX-License-Identifier: Apache-2.0
// Steps whose backwards are in two parts: see [Note: parts of a backward].
#include <atomic>
#include <map>
#include <set>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/observe/event.h"
#include "tests/pipeline/reference_fixture.h"

namespace lamina::pipeline {
namespace {

using observe::What;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

constexpr std::int64_t kSize = 4;

void expect_all(const std::vector<Pipeline::Outcome>& outcomes, const std::string& text) {
  for (const auto& outcome : outcomes) {
    const auto message = message_of(outcome.error);
    EXPECT_TRUE(text.empty() ? message.empty() : message.find(text) != std::string::npos) << message;
  }
}

at::Tensor numbers(double seed, at::IntArrayRef sizes) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kFloat).mul_(1.3).add_(seed)).view(sizes);
}

// A chain with a layer on each rank, which is called twice, with another one of its weight between.
class Chain {
 public:
  Chain(int ranks, const std::string& schedule, std::uint64_t seed = 0, bool deterministic = false)
      : Chain(ranks, schedule, 2 * ranks + 1, seed, deterministic) {}
  Chain(int ranks, const std::string& schedule, int active, std::uint64_t seed, bool deterministic)
      : model(ranks, schedule, seed, active, deterministic) {
    for (int rank = 0; rank < ranks; ++rank) {
      weights.push_back(numbers(rank, {kSize, kSize}).set_requires_grad(true));
      layers.push_back(model.add_function(base::str("layer", rank), rank, [this, rank](const at::Tensor& x) {
        auto y = at::linear(x, weights[rank]).exp().tanh();
        if (rank > 0) note(y);
        return y;
      }));
      tails.push_back(model.add_function(base::str("tail", rank), rank, [this, rank](const at::Tensor& x) {
        return at::linear(at::linear(x, weights[rank]).sin(), weights[rank]);
      }));
      if (deterministic) model.job(rank).set_order({weights[rank]}, /*forwards_change_the_model=*/false);
    }
  }

  void body(base::Microbatch microbatch) {
    auto x = numbers(10 + static_cast<double>(microbatch.value), {2, kSize});
    for (std::size_t rank = 0; rank < layers.size(); ++rank) {
      x = model.call(tails[rank], model.call(layers[rank], model.call(layers[rank], x)));
    }
    model.backward(x.square().sum());
  }
  std::vector<Pipeline::Outcome> step(int microbatches) {
    return model.attempt(microbatches, [this](base::Microbatch microbatch) { body(microbatch); });
  }
  std::int64_t kept() {
    const std::lock_guard guard(mutex_);
    return std::ranges::count_if(made_, [](const auto& each) { return !each.expired(); });
  }

  std::vector<at::Tensor> weights;
  Model model;
  std::vector<base::ModuleId> layers, tails;

 private:
  void note(const at::Tensor& made) {
    const std::lock_guard guard(mutex_);
    made_.push_back(made.storage().getWeakStorageImpl());
  }

  std::mutex mutex_;
  std::vector<WeakStorage> made_;  // by other ranks than the first, and kept by their graphs
};

at::Tensor gradients(const Chain& chain) {
  std::vector<at::Tensor> all;
  for (const auto& weight : chain.weights) all.push_back(weight.grad());
  return at::stack(all);
}

class ZeroBubble : public testing::TestWithParam<std::pair<int, int>> {};

TEST_P(ZeroBubble, HasTheGradientsOfInterleaved) {
  const auto [ranks, microbatches] = GetParam();
  Chain split(ranks, "zero_bubble"), whole(ranks, "interleaved");
  for (int step = 0; step < 3; ++step) {
    expect_all(split.step(microbatches), "");
    expect_all(whole.step(microbatches), "");
    EXPECT_EQ(split.kept(), 0);
  }
  EXPECT_TRUE(at::allclose(gradients(split), gradients(whole), 1e-4, 1e-4));
}

TEST_P(ZeroBubble, HasTheBitsOfInterleavedInADeterministicJob) {
  const auto [ranks, microbatches] = GetParam();
  Chain whole(ranks, "interleaved", 0, /*deterministic=*/true);
  for (int step = 0; step < 2; ++step) expect_all(whole.step(microbatches), "");
  for (std::uint64_t seed = 0; seed < 5; ++seed) {
    Chain split(ranks, "zero_bubble", seed, /*deterministic=*/true);
    for (int step = 0; step < 2; ++step) expect_all(split.step(microbatches), "");
    EXPECT_TRUE(at::equal(gradients(split), gradients(whole))) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, ZeroBubble,
                         testing::Values(std::pair{2, 1}, std::pair{2, 7}, std::pair{3, 4}, std::pair{4, 10}),
                         [](const auto& info) {
                           return base::str(info.param.first, "Ranks", info.param.second, "Microbatches");
                         });

TEST(ZeroBubbleTimeline, HasWeightPartsOfTheLastMicrobatchesOnEachRank) {
  Chain chain(2, "zero_bubble");
  for (int rank = 0; rank < 2; ++rank) chain.model.recorder(rank).start({.ranks = {{.rank = rank}}});
  expect_all(chain.step(6), "");
  for (int rank = 0; rank < 2; ++rank) {
    std::map<What, std::multiset<std::int64_t>> turns;
    for (const auto& event : chain.model.recorder(rank).stop().ranks.at(0).events) {
      if (observe::is_turn(event.what)) turns[event.what].insert(event.microbatch);
    }
    for (std::int64_t microbatch = 0; microbatch < 6; ++microbatch) {
      EXPECT_GT(turns[What::kForward].count(microbatch), 0);
      EXPECT_GT(turns[What::kBackward].count(microbatch), 0);
      const std::size_t served = rank == 0 ? 1 : 3;  // calls; what the step body runs itself is one
      EXPECT_EQ(turns[What::kWeights].count(microbatch), microbatch < 2 ? 0 : served);
    }
  }
}

TEST(ZeroBubbleParts, TheCallerGoesOnWhileTheWeightPartOfACallWaits) {
  Model model(2, "zero_bubble");
  const auto here = leaf(3), there = leaf(2);
  Gate gate;
  here.register_hook([&](const at::Tensor&) { gate.open(); });
  there.register_hook([&](const at::Tensor&) { gate.pass(); });
  const auto module = model.add_scaling("module", 1, there);
  for (int step = 0; step < 2; ++step) {  // the second one is predicted
    gate.shut();
    model.run(1, [&](base::Microbatch) {
      model.backward(model.call(module, here * 2).sum());
      EXPECT_TRUE(at::equal(here.grad(), at::full({3}, 4.0 * (step + 1), at::kDouble)));
    });
    EXPECT_TRUE(at::equal(there.grad(), at::full({3}, 6.0 * (step + 1), at::kDouble)));
  }
}

TEST(ZeroBubbleParts, ADeterministicBodyFindsItsGradientsWhereverItReadsThem) {
  Model model(2, "zero_bubble", /*seed=*/0, /*active=*/5, /*deterministic=*/true);
  const auto here = leaf(3), there = leaf(2);
  const auto module = model.add_scaling("module", 1, there);
  model.job(0).set_order({here}, false);
  model.job(1).set_order({there}, false);
  model.run(4, [&](base::Microbatch) {
    const auto x = at::ones({3}, at::kDouble);
    model.backward(model.call(module, here * 2).sum());
    EXPECT_TRUE(at::equal(here.grad(), x * 4));
    model.call(module, x).sum().item<double>();  // other turns come between
    EXPECT_TRUE(at::equal(here.grad(), x * 4));
  });
  EXPECT_TRUE(at::equal(here.grad(), at::full({3}, 16.0, at::kDouble)));
}

TEST(ZeroBubbleParts, AMicrobatchIsActiveUntilItsWeightPartsHaveEnded) {
  Chain chain(2, "zero_bubble", /*active=*/1, /*seed=*/0, /*deterministic=*/false);
  std::mutex mutex;
  std::string order;
  const auto note = [&](char what) {
    const std::lock_guard guard(mutex);
    order += what;
  };
  for (const auto& weight : chain.weights) weight.register_hook([&](const at::Tensor&) { note('w'); });
  expect_all(chain.model.attempt(3,
                                 [&](base::Microbatch microbatch) {
                                   note('b');
                                   chain.body(microbatch);
                                 }),
             "");
  EXPECT_EQ(order, "bwwwwbwwwwbwwww");  // one of the first rank, three of the other one
}

class ZeroBubbleFailures : public testing::TestWithParam<int> {};

TEST_P(ZeroBubbleFailures, AWeightPartThatFailsEndsTheStepOnAllRanksAndTheJobGoesOn) {
  constexpr int kMicrobatches = 5;
  const int rank = GetParam();
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    Chain chain(3, "zero_bubble", seed), other(3, "interleaved");
    std::atomic<int> left = -1;
    chain.weights[rank].register_hook([&](const at::Tensor&) {
      if (left.fetch_sub(1) == 0) throw std::runtime_error("failed on purpose");
    });
    expect_all(chain.step(kMicrobatches), "");
    left = static_cast<int>(seed % kMicrobatches);
    expect_all(chain.step(kMicrobatches), "failed on purpose");
    left = -1;
    EXPECT_EQ(chain.kept(), 0);
    for (auto* each : {&chain, &other}) {
      for (auto& weight : each->weights) weight.mutable_grad() = at::Tensor();
      expect_all(each->step(kMicrobatches), "");
    }
    EXPECT_TRUE(at::allclose(gradients(chain), gradients(other), 1e-4, 1e-4));
  }
}

TEST_P(ZeroBubbleFailures, AStepThatEndsBetweenThePartsLeavesNothing) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    Chain chain(3, "zero_bubble", seed);
    std::atomic<bool> bad = false;
    const auto failing = chain.model.add_function("failing", GetParam(), [&](const at::Tensor& x) {
      if (bad) throw std::runtime_error("failed on purpose");
      return x * 2;
    });
    const auto step = [&] {
      return chain.model.attempt(6, [&](base::Microbatch microbatch) {
        chain.body(microbatch);
        if (microbatch.value == static_cast<std::int64_t>(seed % 6)) {
          chain.model.call(failing, at::ones({2})).sum().item<float>();
        }
      });
    };
    expect_all(step(), "");
    bad = true;
    expect_all(step(), "failed on purpose");
    EXPECT_EQ(chain.kept(), 0);
    bad = false;
    expect_all(step(), "");
    EXPECT_EQ(chain.kept(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, ZeroBubbleFailures, testing::Values(0, 1, 2));

}  // namespace
}  // namespace lamina::pipeline
