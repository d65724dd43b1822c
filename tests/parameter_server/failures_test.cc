// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <thread>

#include "tests/comes_true.h"
#include "tests/message_of.h"
#include "tests/parameter_server/ranks.h"

namespace lamina::parameter_server {
namespace {

using base::PeerError;
using base::UsageError;
using testing::AllOf;
using testing::HasSubstr;
using value::RemoteFailure;
const base::Rank kOwner(0);
const std::vector<double> kSgd = {1, 0, 0, 0, 0, 0};

// A linear layer on rank 0, an optimizer of it, and an input.
class Failures : public testing::Test {
 protected:
  at::Tensor weight = at::randn({2, 2}).requires_grad_(true), bias = at::randn({2}).requires_grad_(true);
  const at::Tensor input = at::randn({3, 2});
  std::atomic<bool> entered = false, go_on = false;
  Ranks ranks{3};
  RemoteModule net = ranks[0].place(linear("net", weight, bias));
  RemoteOptimizer sgd = ranks[1].trainer().make_optimizer("SGD", kSgd, addresses(net), ranks.patience());

  // A module that is in its call until the test goes on.
  Placed waits(const std::string& name) {
    return {name,
            [this](value::Value) -> value::Value {
              entered = true;
              EXPECT_TRUE(comes_true([&] { return go_on.load(); }));
              return weight.sum();
            },
            {}};
  }

  at::Tensor loss(int rank = 1) { return called(ranks[rank], net, input, ranks.patience()).sum(); }
  void backward(const InContext& in, const at::Tensor& loss, int rank = 1) {
    ranks[rank].trainer().backward(*in.context, {loss}, {}, false, ranks.patience());
  }
  void step(AutogradContext& context, int rank = 1) { ranks[rank].trainer().step(context, sgd, ranks.patience()); }
};

TEST_F(Failures, AContextIsUsedForOneUpdate) {
  const InContext in(ranks[1]);
  const auto kept = loss();
  backward(in, loss());
  step(*in.context);
  const auto after = weight.detach().clone();
  EXPECT_THAT(
      message_of<UsageError>([&] { step(*in.context); }),
      AllOf(HasSubstr("context 1 of rank 1 was used for an update already"), HasSubstr("[remote-context-stepped]")));
  EXPECT_THAT(message_of<UsageError>([&] { backward(in, kept); }), HasSubstr("[remote-context-stepped]"));
  // By another optimizer of the same parameters, which only the owner knows.
  sgd = ranks[1].trainer().make_optimizer("SGD", kSgd, addresses(net), ranks.patience());
  EXPECT_THAT(message_of<RemoteFailure>([&] { step(*in.context); }), HasSubstr("[remote-context-stepped]"));
  EXPECT_TRUE(weight.equal(after));
}

TEST_F(Failures, AContextIsNotUsedAfterItsEndOrBeforeABackward) {
  std::shared_ptr<AutogradContext> ended;
  at::Tensor kept;
  {
    const InContext in(ranks[1]);
    kept = loss();
    EXPECT_THAT(message_of<UsageError>([&] { step(*in.context); }), HasSubstr("[remote-no-backward]"));
    EXPECT_THAT(message_of<UsageError>([&] { InContext inner(ranks[1]); }), HasSubstr("[remote-context-nested]"));
    ended = in.context;
  }
  EXPECT_THAT(message_of<UsageError>([&] { ranks[1].trainer().backward(*ended, {kept}, {}, false, ranks.patience()); }),
              HasSubstr("context 1 of rank 1 has ended"));
  EXPECT_THAT(message_of<UsageError>([&] { step(*ended); }), HasSubstr("[remote-context-ended]"));
}

TEST_F(Failures, AContextOrAModuleOfAnotherJobIsRefused) {
  Ranks others(2);
  const auto theirs = others[0].place(linear("net", weight, bias));
  const InContext in(ranks[1]);
  backward(in, loss());
  EXPECT_THAT(message_of<UsageError>([&] { others[1].trainer().step(*in.context, sgd, ranks.patience()); }),
              AllOf(HasSubstr("context 1 of rank 1 is of another job"), HasSubstr("[remote-other-job]")));
  EXPECT_THAT(message_of<RemoteFailure>([&] { called(ranks[1], theirs, input, ranks.patience()); }),
              HasSubstr("[remote-other-job]"));
}

TEST_F(Failures, ABackwardThatIsNotTheContextsIsRefused) {
  const InContext in(ranks[1]);
  const auto kept = loss();
  EXPECT_THAT(message_of<UsageError>([&] { kept.backward(); }),
              AllOf(HasSubstr("backward of net on rank 0 in context 1 of rank 1"), HasSubstr("[remote-backward]")));
  EXPECT_FALSE(weight.grad().defined());
}

TEST_F(Failures, ASecondBackwardThroughACallSaysWhatToDo) {
  const InContext in(ranks[1]);
  const auto output = called(ranks[1], net, input, ranks.patience());
  backward(in, output.sum());
  EXPECT_THAT(message_of<RemoteFailure>([&] { backward(in, output.sum()); }),
              AllOf(HasSubstr("retain_graph=True"), HasSubstr("[remote-graph-gone]")));
}

TEST_F(Failures, BadInputIsRefusedBeforeAnythingIsSent) {
  ranks.network().hold(base::Rank(1), kOwner);  // a request would wait until the test's end
  const auto refused = [&](const std::string& name, std::vector<double> hyper) {
    return message_of<UsageError>(
        [&] { ranks[1].trainer().make_optimizer(name, hyper, addresses(net), {std::chrono::seconds(1)}); });
  };
  EXPECT_THAT(refused("SGD", {-1, 0, 0, 0, 0, 0}), HasSubstr("Invalid learning rate: -1"));
  EXPECT_THAT(refused("Sgd", kSgd), HasSubstr("no functional optimizer \"Sgd\""));
  const InContext in(ranks[1]);
  EXPECT_THAT(message_of<UsageError>([&] { backward(in, at::ones({1})); }), HasSubstr("does not require grad"));
  ranks.network().release(base::Rank(1), kOwner);
}

TEST_F(Failures, ALostOwnerIsAnErrorThatNamesItAtOnceAndFromThenOn) {
  const auto slow = ranks[0].place(waits("slow"));
  const InContext in(ranks[1]);
  const auto kept = loss();
  std::thread owner([&] {
    EXPECT_TRUE(comes_true([&] { return entered.load(); }));
    ranks.network().kill(kOwner);
  });
  EXPECT_THAT(message_of<PeerError>([&] { called(ranks[1], slow, input, ranks.patience()); }),
              AllOf(HasSubstr("call of slow on rank 0 in context 1 of rank 1: rank 0 is lost"),
                    HasSubstr("[remote-owner-lost]")));
  owner.join();
  go_on = true;
  EXPECT_THAT(message_of<PeerError>([&] { backward(in, kept); }),
              AllOf(HasSubstr("backward of net on rank 0"), HasSubstr("rank 0 is lost")));
  EXPECT_THAT(message_of<PeerError>([&] { step(*in.context); }), HasSubstr("update of parameters on rank 0"));
  EXPECT_THAT(message_of<PeerError>([&] { loss(); }), HasSubstr("call of net on rank 0"));
}

// Rank 2 dies while a call of its runs on the owner, which holds the turn.
TEST_F(Failures, ADeadTrainerHoldsNobodyUpAndItsContextGoes) {
  const auto slow = ranks[0].place(waits("slow"));
  std::thread trainer([&] {
    const InContext in(ranks[2]);
    EXPECT_THROW(called(ranks[2], slow, input, ranks.patience()), base::Error);
  });
  ASSERT_TRUE(comes_true([&] { return entered.load(); }));
  EXPECT_EQ(ranks[0].contexts(), 1U);
  ranks.network().kill(base::Rank(2));
  EXPECT_TRUE(comes_true([&] { return ranks[0].contexts() == 0; }));
  go_on = true;
  const InContext in(ranks[1]);
  backward(in, loss());
  step(*in.context);
  ranks[2].end();  // its process is gone: wakes its thread
  trainer.join();
}

// Rank 2 dies while a module on rank 1 that serves it waits for one on rank 0, from where no answer will come.
TEST_F(Failures, AModuleThatCallsAnotherOneForADeadTrainerEnds) {
  std::promise<std::string> error;
  const auto outer = ranks[1].place({"outer",
                                     [&](value::Value input) -> value::Value {
                                       entered = true;
                                       error.set_value(message_of<base::CancelledError>(
                                           [&] { called(ranks[1], net, input.as<at::Tensor>(), ranks.patience()); }));
                                       return value::None();
                                     },
                                     {}});
  ranks.network().hold(base::Rank(1), kOwner);  // the request comes after the news
  std::thread trainer([&] {
    const InContext in(ranks[2]);
    EXPECT_THROW(ranks[2].trainer().call(outer.address, outer.label(), input, ranks.patience()), base::Error);
  });
  ASSERT_TRUE(comes_true([&] { return entered.load(); }));
  ranks.network().kill(base::Rank(2));
  auto said = error.get_future();
  ASSERT_EQ(said.wait_for(std::chrono::seconds(30)), std::future_status::ready);
  EXPECT_THAT(said.get(), HasSubstr("rank 2, whose context it is, is lost"));
  ranks.network().release(base::Rank(1), kOwner);
  ranks[2].end();  // its process is gone: wakes its thread
  trainer.join();
}

TEST_F(Failures, AnOwnerThatDoesNotAnswerIsNamedAtTheDeadline) {
  ranks.network().hold(kOwner, base::Rank(1));
  const auto text =
      message_of<base::TimeoutError>([&] { called(ranks[1], net, input, {std::chrono::milliseconds(20)}); });
  EXPECT_THAT(text, AllOf(HasSubstr("call of net on rank 0: no answer for"), HasSubstr("raise timeout_s")));
  ranks.network().release(kOwner, base::Rank(1));
  EXPECT_TRUE(called(ranks[1], net, input, ranks.patience()).defined());  // a late answer disturbs nobody
}

TEST_F(Failures, AnOwnerServesUntilAllOthersHaveLeft) {
  auto serving = std::async(std::launch::async, [&] { ranks[0].serve(ranks.patience()); });
  ranks.network().kill(base::Rank(1));
  EXPECT_EQ(serving.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  ranks.network().kill(base::Rank(2));
  EXPECT_NO_THROW(serving.get());
}

TEST_F(Failures, AnOwnerThatNobodyAsksEndsItsServiceAtTheDeadline) {
  EXPECT_THAT(message_of<base::TimeoutError>([&] { ranks[0].serve({std::chrono::milliseconds(20)}); }),
              HasSubstr("2 ranks have not left"));
}

TEST_F(Failures, NamesAndParametersArePlacedOnce) {
  EXPECT_THAT(message_of<UsageError>([&] { ranks[0].place(linear("net", weight, bias)); }),
              HasSubstr("by the name \"net\""));
  EXPECT_THAT(message_of<UsageError>([&] { ranks[0].place(linear("", weight * 2, bias)); }),
              HasSubstr("\"weight\" is the result of an operation"));
  auto twice = addresses(net);
  twice.push_back(twice.front());
  EXPECT_THAT(
      message_of<RemoteFailure>([&] { ranks[1].trainer().make_optimizer("SGD", kSgd, twice, ranks.patience()); }),
      HasSubstr("one parameter twice"));
}

TEST_F(Failures, WhatOnlyALostTrainerCouldNameGoesWithIt) {
  const auto of_other = ranks[2].trainer().make_optimizer("SGD", kSgd, addresses(net), ranks.patience());
  const auto shared = ranks[1].trainer().make_optimizer("SGD", kSgd, addresses(net), ranks.patience());
  ranks[1].trainer().share(Shared::kOptimizer, shared.parts[0], ranks.patience());
  EXPECT_EQ(ranks[0].owned().optimizers(), 3);
  ranks.network().kill(base::Rank(1));
  EXPECT_TRUE(comes_true([&] { return ranks[0].owned().optimizers() == 2; }));
  EXPECT_EQ(ranks[0].owned().modules(), 1);  // which its owner has placed
  for (const auto& [optimizer, stays] : {std::pair(of_other, true), {shared, true}, {sgd, false}}) {
    const InContext in(ranks[2]);
    backward(in, loss(2), 2);
    const auto update = [&] { ranks[2].trainer().step(*in.context, optimizer, ranks.patience()); };
    if (stays) {
      EXPECT_NO_THROW(update());
    } else {
      EXPECT_THAT(message_of<RemoteFailure>(update), HasSubstr("[remote-other-job]"));
    }
  }
}

}  // namespace
}  // namespace lamina::parameter_server
