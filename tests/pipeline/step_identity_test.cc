// SPDX-License-Identifier: Apache-2.0
// Ranks of a pipeline that are not in the same step: who hears of it, when, and what is left of the job.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>

#include "lamina/base/error.h"
#include "tests/comes_true.h"
#include "tests/pipeline/pipeline_fixture.h"
#include "tests/soak.h"

namespace lamina::pipeline {
namespace {

using base::Rank;
using value::Value;
using Clock = base::Clock;

constexpr auto kPromised = std::chrono::seconds(2);
const std::function<void()> kNothing = [] {};
const base::Call kTrain{"train", "train.py:16", ""}, kEvaluate{"evaluate", "train.py:17", ""};

// A pipeline of which each rank does what it is told, with a module on the last one that counts its calls.
class OutOfStep {
 public:
  explicit OutOfStep(int size, std::uint64_t seed = 0) : pipeline(size, "interleaved", seed) {
    remote = pipeline.add("remote", size - 1, [this](Job&) {
      return [this](Value x) {
        in_remote();
        ++calls;
        return x;
      };
    });
  }

  std::vector<Value> step(int rank, const base::Call& call, bool calls_remote = true) {
    auto& job = pipeline.job(rank);
    const auto body = [this, &job, calls_remote](base::Microbatch) {
      return calls_remote ? job.call(remote, Value(at::ones({2}))) : Value(at::ones({2}));
    };
    return job.run_step({2, body, kNothing, call}).outputs;
  }

  base::Patience patience(const std::string& name) const {
    base::Patience patience{std::chrono::seconds(60), nullptr};
    patience.call = [=] { return base::Call{name, "train.py:18", name}; };
    return patience;
  }
  void barrier(int rank, const std::string& name = "model.state_dict()") {
    std::vector<Rank> all;
    for (int i = 0; i < pipeline.size(); ++i) all.emplace_back(i);
    pipeline.mailbox(rank).barrier(all, patience(name));
  }

  // Errors of each rank's program, as text.
  std::vector<std::string> run(const std::function<void(int)>& program) {
    std::vector<std::string> errors(pipeline.size());
    std::vector<std::thread> mains;
    for (int rank = 0; rank < pipeline.size(); ++rank) {
      mains.emplace_back([&, rank] {
        try {
          program(rank);
        } catch (...) {
          errors[rank] = message_of(std::current_exception());
        }
      });
    }
    for (auto& main : mains) main.join();
    return errors;
  }

  void expect_agreement() {
    const auto before = calls.load();
    const auto errors = run([&](int rank) {
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(step(rank, kTrain).size(), 2) << rank;
        barrier(rank);
      }
    });
    for (const auto& error : errors) EXPECT_EQ(error, "");
    EXPECT_EQ(calls - before, 6);
  }

  Pipeline pipeline;
  base::ModuleId remote;
  std::function<void()> in_remote = [] {};
  std::atomic<int> calls = 0;
};

void expect_all(const std::vector<std::string>& errors, const std::vector<std::string>& words) {
  for (const auto& error : errors) {
    for (const auto& word : words) EXPECT_NE(error.find(word), std::string::npos) << error;
  }
}

const std::vector<std::string> kBoth = {"rank 0 has entered the step function evaluate at train.py:17",
                                        "rank 1 train at train.py:16"};

TEST(StepIdentity, OfAnotherFunctionEndsTheStepOnAllRanksAndNothingOfItIsDone) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(20, 6); ++seed) {
    OutOfStep all(3, seed);
    std::atomic<bool> refused = false;  // by rank 1, which the step needs for nothing: it might end before
    all.in_remote = [&] { EXPECT_TRUE(comes_true([&] { return refused.load(); })); };
    const auto errors = all.run([&](int rank) {
      try {
        all.step(rank, rank == 1 ? kTrain : kEvaluate);
      } catch (...) {
        if (rank == 1) refused = true;
        throw;
      }
    });
    all.in_remote = [] {};
    expect_all({errors[0], errors[1]}, kBoth);
    EXPECT_NE(errors[2].find("train at train.py:16"), std::string::npos) << errors[2];
    all.expect_agreement();
  }
}

TEST(StepIdentity, IsComparedBeforeARequestThatHasComeEarlierIsServed) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(20, 6); ++seed) {
    OutOfStep all(2, seed);
    std::atomic<bool> asked = false;
    const auto errors = all.run([&](int rank) {
      while (rank == 1 && !asked) std::this_thread::yield();
      if (rank == 1) return void(all.step(1, kTrain));
      all.pipeline.job(0).run_step({1,
                                    [&](base::Microbatch) {
                                      asked = true;
                                      return all.pipeline.job(0).call(all.remote, Value(at::ones({2})));
                                    },
                                    kNothing, kEvaluate});
    });
    expect_all(errors, kBoth);
    EXPECT_EQ(all.calls, 0);
    all.expect_agreement();
  }
}

TEST(StepIdentity, OfAStepThatNeedsNoOtherRankIsComparedTooAndTheLeadingOneHearsOfItInItsNextStep) {
  OutOfStep all(2);
  std::atomic<bool> over = false, refused = false;
  const auto errors = all.run([&](int rank) {
    while (rank == 1 && !over) std::this_thread::yield();
    if (rank == 0) {
      EXPECT_EQ(all.step(0, kEvaluate, /*calls_remote=*/false).size(), 2);
      over = true;
      while (!refused) std::this_thread::yield();
      return void(all.step(0, kTrain));
    }
    try {
      all.step(1, kTrain);
    } catch (...) {
      refused = true;
      throw;
    }
  });
  expect_all(errors, kBoth);
}

TEST(StepIdentity, OfTheSameFunctionIsNoMatterOfWhereItIsCalled) {
  OutOfStep all(2);
  const auto errors = all.run([&](int rank) { all.step(rank, {"train", base::str("train.py:", rank), ""}); });
  expect_all(errors, {""});
  EXPECT_EQ(errors, std::vector<std::string>(2));
  all.expect_agreement();
}

TEST(MutualWaits, OfAStepAndACollectiveAreToldOnBothSidesWithin2sWhoeverLeads) {
  for (const int in_step : {0, 1}) {
    OutOfStep all(2, in_step);
    for (int round = 0; round < 2; ++round) {
      const auto began = Clock::now();
      const auto errors =
          all.run([&](int rank) { rank == in_step ? void(all.step(rank, kTrain)) : all.barrier(rank); });
      EXPECT_LT(Clock::now() - began, kPromised);
      expect_all(errors, {"of train at train.py:16 for rank", "model.state_dict() at train.py:18 for rank",
                          "ranks wait for each other"});
      all.expect_agreement();
    }
  }
}

TEST(MutualWaits, OfAStepEndItForRanksThatHaveOnlyJoinedIt) {
  for (const int in_barrier : {0, 2}) {
    OutOfStep all(3, in_barrier);
    const auto errors = all.run(
        [&](int rank) { rank == in_barrier ? all.barrier(rank, "clip_grad_norm_()") : void(all.step(rank, kTrain)); });
    expect_all(errors, {"of train at train.py:16", "clip_grad_norm_() at train.py:18"});
    all.expect_agreement();
  }
}

// Rank 0 asks rank 1, which asks rank 2: that one waits for rank 1 alone.
TEST(MutualWaits, ThroughACallInsideOfACallAreFound) {
  OutOfStep all(3);
  const auto middle = all.pipeline.add("middle", 1, [&](Job& job) {
    return [&, remote = all.remote](Value x) { return job.call(remote, std::move(x)); };
  });
  const auto errors = all.run([&](int rank) {
    if (rank == 2) {
      all.pipeline.mailbox(2).receive(Rank(1), "user", all.patience("lamina.recv_from()"));
      return;
    }
    all.pipeline.job(rank).run_step(
        {1, [&](base::Microbatch) { return all.pipeline.job(0).call(middle, Value(at::ones({2}))); }, kNothing,
         kTrain});
  });
  expect_all(errors, {"lamina.recv_from() at train.py:18 for rank 1", "of train at train.py:16"});
  all.expect_agreement();
}

// The owner of the module takes longer than the moment after which waits are told of; the others wait in the step.
TEST(MutualWaits, AreNotSeenWhereARankComputesInTheStepOrComesLateToIt) {
  OutOfStep all(2);
  const auto slow = all.pipeline.add("slow", 1, [](Job&) {
    return [](Value x) {
      const auto computed = Clock::now() + std::chrono::milliseconds(1200);
      while (Clock::now() < computed) std::this_thread::yield();
      return x;
    };
  });
  const auto errors = all.run([&](int rank) {
    const auto late = Clock::now() + std::chrono::milliseconds(rank == 1 ? 1200 : 0);
    while (Clock::now() < late) std::this_thread::yield();
    all.pipeline.job(rank).run_step(
        {1, [&](base::Microbatch) { return all.pipeline.job(0).call(slow, Value(at::ones({2}))); }, kNothing, kTrain});
    all.barrier(rank);
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  all.expect_agreement();
}

}  // namespace
}  // namespace lamina::pipeline
