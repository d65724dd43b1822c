// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/reducer.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/data_parallel/replica_threads.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::data_parallel {
namespace {

using namespace std::chrono_literals;

at::Tensor full(double value) { return at::full({2}, value, at::kDouble); }

// One replica's model of a weight and a buffer, and its reducer.
struct Replica {
  Replica(int index, ReplicaThreads& threads, messaging::Mailboxes& boxes, ReducerOptions options)
      : index(index),
        weight(full(0).set_requires_grad(true)),
        mean(full(index)),
        reducer(options, boxes[index], boxes.ranks(), {60s}, std::make_shared<value::Failures>(),
                {[this] { return std::vector<NamedTensor>{{"weight", weight}}; },
                 [this] { return std::vector<NamedTensor>{{"mean", mean}}; },
                 [this](const base::Patience&) -> collective::Group& { return *group; }}),
        group(threads.member(index)) {}

  // A backward in a step that adds to the gradient.
  void step(double gradient) {
    const auto train = [&](const pipeline::StepSpec& spec) {
      EXPECT_FALSE(spec.saw_backward());
      reducer.run_backward([&] { add(gradient); });
      EXPECT_TRUE(spec.saw_backward());
      return pipeline::StepResult{{}, /*backward=*/true};
    };
    reducer.run_step({}, /*training=*/true, train);
  }
  // A step that fails.
  void fail(const std::string& text) {
    const auto throws = [&](const auto&) -> pipeline::StepResult { throw std::invalid_argument(text); };
    EXPECT_THROW(reducer.run_step({}, /*training=*/true, throws), std::invalid_argument);
  }
  void add(double gradient) {
    auto& all = weight.mutable_grad();
    all = all.defined() ? all + gradient : full(gradient);
  }
  double gradient() const { return weight.grad()[0].item<double>(); }

  int index;
  at::Tensor weight, mean;
  Reducer reducer;
  std::unique_ptr<ReplicaThreads::Member> group;
};

void run(int size, const std::function<void(Replica&)>& replica, ReducerOptions options = {}) {
  messaging::Mailboxes boxes(size);
  ReplicaThreads threads(size);
  const auto errors = boxes.run([&](int i) {
    Replica mine(i, threads, boxes, options);
    replica(mine);
  });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

TEST(Reducer, APassAveragesGradientsAndGivesAllTheBuffersOfTheFirst) {
  run(3, [](Replica& replica) {
    replica.step(replica.index);
    EXPECT_EQ(replica.gradient(), 1);
    EXPECT_EQ(replica.mean[0].item<double>(), 0);
    EXPECT_EQ(replica.group->purposes,
              (std::vector<std::string>{"averaging gradients", "averaging gradients", "broadcasting buffers"}));
  });
}

// Two pairs of replicas have the same slices each; see [Note: two reductions].
TEST(Reducer, SlicesAreAveragedOverThoseThatHaveTheSameInTheSamePass) {
  messaging::Mailboxes boxes(4);
  ReplicaThreads all(4), even(2), odd(2);
  const auto errors = boxes.run([&](int i) {
    const auto everyone = all.member(i), same = (i % 2 == 0 ? even : odd).member(i / 2);
    auto weight = full(0), slice = at::zeros({1 + i % 2}, at::kDouble);  // as wide as the other replica's
    const auto named = [](const char* name, const at::Tensor& tensor) {
      return [=] { return std::vector<NamedTensor>{{name, tensor}}; };
    };
    const auto group = [](auto& member) {
      return [&member](const base::Patience&) -> collective::Group& { return *member; };
    };
    Reducer reducer({}, boxes[i], boxes.ranks(), {60s}, std::make_shared<value::Failures>(),
                    {named("weight", weight), [] { return std::vector<NamedTensor>(); }, group(everyone),
                     GroupReduction::Over{named("slice", slice), group(same)}});
    const auto train = [&](const pipeline::StepSpec& /*spec*/) {
      reducer.run_backward([&] {
        for (auto* tensor : {&weight, &slice}) {
          auto& gradient = tensor->mutable_grad();
          gradient = (gradient.defined() ? gradient : at::zeros_like(*tensor)) + i;
        }
      });
      return pipeline::StepResult{{}, /*backward=*/true};
    };
    for (int pass = 1; pass <= 2; ++pass) {  // gradients that were reduced before stay what they are
      reducer.run_step({}, /*training=*/true, train);
      EXPECT_EQ(weight.grad()[0].item<double>(), 1.5 * pass);
      EXPECT_EQ(slice.grad()[0].item<double>(), (1 + i % 2) * pass);
    }
    EXPECT_THROW(reducer.set_hook([](const GradientBucket& bucket) { return bucket.gradients; }), base::UsageError);
    EXPECT_THROW(reducer.begin_join(true, false), base::UsageError);
  });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

TEST(Reducer, GradientsAccumulateUntilTheNthPass) {
  const auto replica = [](Replica& replica) {
    replica.step(replica.index);
    EXPECT_EQ(replica.gradient(), replica.index);
    EXPECT_TRUE(replica.group->purposes.empty());
    replica.step(replica.index);
    EXPECT_EQ(replica.gradient(), 1);
  };
  run(2, replica, {.passes_per_reduction = 2});
}

TEST(Reducer, BuffersAreLeftAloneOnRequest) {
  const auto replica = [](Replica& replica) {
    replica.mean = at::zeros({1 + replica.index});
    replica.step(1);
    EXPECT_EQ(replica.gradient(), 1);
  };
  run(2, replica, {.broadcast_buffers = false});
}

TEST(Reducer, BuffersThatDifferAreAnErrorBeforeAnyGradientHasChanged) {
  run(2, [](Replica& replica) {
    replica.mean = at::zeros({1 + replica.index});
    EXPECT_THROW(replica.step(replica.index), base::UsageError);
    EXPECT_EQ(replica.gradient(), replica.index);
    EXPECT_FALSE(replica.reducer.stuck());
  });
}

TEST(Reducer, AnErrorThatNobodyKnowsLeavesCollectivesThatMayNeverEnd) {
  run(1, [](Replica& replica) {
    replica.reducer.set_hook([](const auto&) -> at::Tensor { throw std::invalid_argument("a bad hook"); });
    EXPECT_THROW(replica.step(1), std::invalid_argument);
    EXPECT_TRUE(replica.reducer.stuck());
  });
}

TEST(Reducer, AStepHasPassedOnceABackwardHasBegunInIt) {
  run(1, [](Replica& replica) {
    replica.step(1);  // which looks before and after
    replica.step(1);
  });
}

TEST(Reducer, AStepThatFailsEndsThePassOnAllUnlessItHadNoGradients) {
  run(2, [](Replica& replica) {
    if (replica.index == 0) {
      {
        const c10::AutoGradMode evaluates(false);
        replica.fail("nobody hears of it");
      }
      replica.fail("bad batch");
    } else {
      EXPECT_THROW(replica.step(1), value::RemoteFailure);
      replica.add(-1);
    }
    replica.step(replica.index);
    EXPECT_EQ(replica.gradient(), 0.5);
  });
}

TEST(Reducer, ABackwardOutsideOfStepsIsAPassAtItsEnd) {
  run(2, [](Replica& replica) {
    auto& reducer = replica.reducer;
    reducer.note_call(true);
    EXPECT_TRUE(reducer.note_backward());
    EXPECT_FALSE(reducer.note_gradient(replica.weight)) << "its end is awaited";
    replica.add(replica.index);
    reducer.end_backward();
    EXPECT_EQ(replica.gradient(), 0.5);
  });
}

TEST(Reducer, ABackwardThatReachesNoParameterIsNone) {
  run(2, [](Replica& replica) {
    if (replica.index == 0 && replica.reducer.note_backward()) replica.reducer.end_backward();
    replica.step(replica.index);
    EXPECT_EQ(replica.gradient(), 0.5);
  });
}

TEST(Reducer, ABackwardWhoseEndNeverCameIsToldWhenTheModelIsCalledNext) {
  run(2, [](Replica& replica) {
    auto& reducer = replica.reducer;
    reducer.note_call(true);
    if (replica.index == 0) {
      reducer.note_gradient(replica.weight);
      reducer.forget_call(reducer.note_call(true));
    } else {
      EXPECT_THROW(replica.step(1), value::RemoteFailure);
      replica.add(-1);
    }
    replica.step(replica.index);
    EXPECT_EQ(replica.gradient(), 0.5);
  });
}

TEST(Reducer, AFailureOfTheModelsOwnBackwardIsToldOnceAndNotAfterItsPass) {
  run(2, [](Replica& replica) {
    auto& reducer = replica.reducer;
    const auto fail = [&](bool meets) {
      const auto backward = [&] {
        reducer.note_gradient(replica.weight);
        if (meets) reducer.end_backward();
        throw std::invalid_argument("no end");
      };
      EXPECT_THROW(reducer.run_backward(backward), std::invalid_argument);
    };
    if (replica.index == 0) {
      fail(/*meets=*/false);
    } else {
      EXPECT_THROW(replica.step(1), value::RemoteFailure);
      replica.add(-1);
    }
    replica.step(replica.index);
    fail(/*meets=*/true);
    replica.step(0);
    EXPECT_EQ(replica.gradient(), 0.5);
  });
}

TEST(Reducer, AnUpdateHasWhatIsLeftOverOfAnAccumulationAndBeginsAnotherOne) {
  const auto replica = [](Replica& replica) {
    replica.step(replica.index);
    EXPECT_TRUE(replica.reducer.accumulates());
    replica.reducer.before_update();
    EXPECT_EQ(replica.gradient(), 0.5);
    replica.reducer.before_update();  // there is nothing left
    replica.weight.mutable_grad() = at::Tensor();
    replica.step(replica.index);
    EXPECT_EQ(replica.gradient(), replica.index);
    replica.step(replica.index);
    EXPECT_EQ(replica.gradient(), 1);
    EXPECT_FALSE(replica.reducer.accumulates());
  };
  run(2, replica, {.passes_per_reduction = 2});
}

TEST(Reducer, BackwardsThatAreHeldBackAddUpUntilTheNextPassOrUpdateHoweverManyTheyAre) {
  run(2, [](Replica& replica) {
    auto& reducer = replica.reducer;
    const auto hold_back = [&] {
      reducer.hold_back();
      for (int i = 0; i <= replica.index; ++i) replica.step(1);
      reducer.release();
    };
    hold_back();
    EXPECT_EQ(replica.gradient(), 1 + replica.index);
    replica.step(1);
    EXPECT_EQ(replica.gradient(), 2.5);
    replica.weight.mutable_grad() = at::Tensor();
    hold_back();
    reducer.before_update();
    EXPECT_EQ(replica.gradient(), 1.5);
  });
}

TEST(Reducer, AnUpdateInAStepWhoseGradientsAreStillToBeAveragedIsAnErrorBeforeIt) {
  run(1, [](Replica& replica) {
    const auto train = [&](const auto&) -> pipeline::StepResult {
      replica.reducer.run_backward([&] { replica.add(1); });
      replica.reducer.before_update();
      return {};
    };
    EXPECT_THROW(replica.reducer.run_step({}, /*training=*/true, train), base::UsageError);
    replica.step(1);
    replica.reducer.before_update();
  });
}

TEST(Reducer, AReplicaThatLeavesOutABackwardIsToldOfBeforeGradientsOfItsNextIterationCount) {
  run(2, [](Replica& replica) {
    replica.step(1);
    replica.reducer.before_update();
    replica.weight.mutable_grad() = at::Tensor();
    if (replica.index == 1) replica.reducer.before_update();
    EXPECT_THROW(replica.step(replica.index), base::DesyncError);
    EXPECT_EQ(replica.gradient(), replica.index);
  });
}

TEST(Reducer, ACallThatNoBackwardFollowedIsToldOfUnlessAllHaveIt) {
  run(2, [](Replica& replica) {
    auto& reducer = replica.reducer;
    for (int i = 0; i <= replica.index; ++i) reducer.forget_call(reducer.note_call(true));  // a backward reached them
    replica.step(1);
    reducer.note_call(true);
    replica.step(1);
    EXPECT_EQ(replica.gradient(), 2);
    if (replica.index == 1) reducer.note_call(true);
    EXPECT_THROW(replica.step(replica.index), base::DesyncError);
  });
}

TEST(Reducer, WhatIsLeftOverOfAnAccumulationCountsInAJoin) {
  const auto replica = [](Replica& replica) {
    replica.reducer.begin_join(/*by_everyone=*/true, /*throws=*/false);
    for (int i = 0; i <= replica.index; ++i) replica.step(1 + replica.index);  // one leaves half of a reduction
    if (replica.index == 1) {
      EXPECT_EQ(replica.gradient(), (1 + 4) / 2.);
    }
    replica.reducer.end_join();
    if (replica.index == 0) {
      EXPECT_EQ(replica.gradient(), 1) << "its own";
    }
  };
  run(2, replica, {.passes_per_reduction = 2});
}

TEST(Reducer, WhoHasLeftAJoinTakesPartWithoutGradientsAndKeepsItsOwn) {
  for (const bool by_everyone : {true, false}) {
    run(2, [&](Replica& replica) {
      replica.reducer.begin_join(by_everyone, /*throws=*/false);
      replica.step(1);
      if (replica.index == 1) {
        replica.weight.mutable_grad() = at::Tensor();
        replica.step(4);
        EXPECT_EQ(replica.gradient(), by_everyone ? 2 : 4);
        replica.mean = full(7);
        const c10::AutoGradMode no_grad(false);
        replica.weight.add_(3);
      }
      replica.reducer.end_join();
      EXPECT_EQ(replica.gradient(), replica.index == 0 ? 1 : by_everyone ? 2 : 4) << "of its own latest pass";
      EXPECT_EQ(replica.mean[0].item<double>(), 7) << "all get what the one has that trained longest";
      EXPECT_EQ(replica.weight[0].item<double>(), 3);
    });
  }
}

TEST(Reducer, TheFirstToLeaveAJoinMayBeAnErrorOfAll) {
  run(2, [](Replica& replica) {
    replica.reducer.begin_join(true, /*throws=*/true);
    try {
      if (replica.index == 1) replica.step(1);
      replica.reducer.end_join();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const base::UsageError& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("join: replicas [0] have run out of data")) << error.what();
    }
  });
}

TEST(Reducer, AHookTakesThePlaceOfTheMeanOnce) {
  run(2, [](Replica& replica) {
    replica.reducer.set_hook([](const GradientBucket& bucket) { return bucket.gradients * 10; });
    EXPECT_THROW(replica.reducer.set_hook([](const auto& bucket) { return bucket.gradients; }), base::UsageError);
    replica.step(1 + replica.index);
    EXPECT_EQ(replica.gradient(), 10 * (1 + replica.index));
    EXPECT_EQ(replica.group->purposes.front(), "reducing gradients");
  });
}

}  // namespace
}  // namespace lamina::data_parallel
