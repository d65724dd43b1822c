// SPDX-License-Identifier: Apache-2.0
// The schedule under many orders of message arrival.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>

#include "tests/pipeline/pipeline_fixture.h"
#include "tests/soak.h"

namespace lamina::pipeline {
namespace {

using value::Value;

// Counts, per microbatch, how often its forward and its backward passed.
struct Counts {
  explicit Counts(int microbatches) : forward(microbatches), backward(microbatches) {}
  std::vector<std::atomic<int>> forward, backward;
};

void run_seed(const std::string& schedule, std::uint64_t seed) {
  constexpr int kRanks = 3, kMicrobatches = 5;
  Pipeline pipeline(kRanks, schedule, seed, 2 + static_cast<int>(seed % 3));
  Counts counts(kMicrobatches);
  const auto make = [&](Job&) {
    return [&](Value x) {
      at::Tensor y = x.as<at::Tensor>() * 2;
      const auto microbatch = runtime::ExecutionContext::current()->microbatch().value;
      ++counts.forward[microbatch];
      if (y.requires_grad()) {
        y.register_hook([&counts, microbatch](const at::Tensor&) { ++counts.backward[microbatch]; });
      }
      return Value(y);
    };
  };
  // 0 -> 1 -> 2 -> 1 -> 0: rank 1 is visited twice, once from inside rank 2.
  const auto middle = pipeline.add("middle", 1, make);
  const auto last = pipeline.add("last", 2, [middle, make](Job& job) {
    return [&job, middle, own = make(job)](Value x) { return job.call(middle, own(std::move(x))); };
  });
  const auto outcomes = pipeline.step(kMicrobatches, [&](base::Microbatch) {
    Value x = at::ones({2}).set_requires_grad(true);
    x = pipeline.job(0).call(last, pipeline.job(0).call(middle, x));
    pipeline.job(0).backward({x.as<at::Tensor>().sum()}, {}, 1);
    return Value();
  });
  for (const auto& outcome : outcomes) ASSERT_EQ(message_of(outcome.error), "") << schedule << " seed " << seed;
  for (int i = 0; i < kMicrobatches; ++i) {
    ASSERT_EQ(counts.forward[i], 3) << schedule << " seed " << seed << " microbatch " << i;
    ASSERT_EQ(counts.backward[i], 3) << schedule << " seed " << seed << " microbatch " << i;
  }
}

// Which microbatches are under way, and the most that ever were.
class UnderWay {
 public:
  void enter(std::int64_t microbatch) {
    std::lock_guard guard(mutex_);
    here_.insert(microbatch);
    most_ = std::max(most_, here_.size());
  }
  void leave(std::int64_t microbatch) {
    std::lock_guard guard(mutex_);
    here_.erase(microbatch);
  }
  std::size_t most() const { return most_; }

 private:
  std::mutex mutex_;
  std::set<std::int64_t> here_;
  std::size_t most_ = 0;
};

// Two ranks; in the second step no body waits for a result before its backward.
void expect_limit(const std::string& schedule, std::uint64_t seed) {
  constexpr int kMicrobatches = 6;
  const int active = 1 + static_cast<int>(seed % 3);
  Pipeline pipeline(2, schedule, seed, active);
  UnderWay forward, whole;
  std::vector<std::atomic<int>> backwards(kMicrobatches);
  const auto module = pipeline.add("module", 1, [&](Job&) {
    return [&](Value x) {
      const auto microbatch = runtime::ExecutionContext::current()->microbatch().value;
      whole.enter(microbatch);
      at::Tensor y = x.as<at::Tensor>() * 2;
      y.register_hook([&, microbatch](const at::Tensor&) {
        if (++backwards[microbatch] % 2 == 0) whole.leave(microbatch);
      });
      return Value(y);
    };
  });
  for (int step = 0; step < 2; ++step) {
    const auto outcomes = pipeline.step(kMicrobatches, [&](base::Microbatch microbatch) {
      forward.enter(microbatch.value);
      Value x = at::ones({}).set_requires_grad(true);
      x = pipeline.job(0).call(module, pipeline.job(0).call(module, x));
      forward.leave(microbatch.value);
      pipeline.job(0).backward({x.as<at::Tensor>()}, {}, 1);
      return Value();
    });
    for (const auto& outcome : outcomes) ASSERT_EQ(message_of(outcome.error), "") << schedule << " seed " << seed;
  }
  ASSERT_LE((schedule == "simple" ? forward : whole).most(), static_cast<std::size_t>(active)) << "seed " << seed;
}

// LAMINA_SOAK multiplies the seeds.
std::uint64_t seeds() { return lamina::test::in_a_soak<std::uint64_t>(20000, 40); }

TEST(ArrivalOrders, SimpleLimitsTheMicrobatchesInTheirForward) {
  for (std::uint64_t seed = 0; seed < seeds() && !HasFatalFailure(); ++seed) expect_limit("simple", seed);
}

TEST(ArrivalOrders, InterleavedLimitsTheMicrobatchesUnderWayOnEveryRank) {
  for (std::uint64_t seed = 0; seed < seeds() && !HasFatalFailure(); ++seed) expect_limit("interleaved", seed);
}

TEST(ArrivalOrders, SimpleNeverDeadlocksAndRunsEachMicrobatchOnce) {
  for (std::uint64_t seed = 0; seed < seeds() && !HasFatalFailure(); ++seed) run_seed("simple", seed);
}

TEST(ArrivalOrders, InterleavedNeverDeadlocksAndRunsEachMicrobatchOnce) {
  for (std::uint64_t seed = 0; seed < seeds() && !HasFatalFailure(); ++seed) run_seed("interleaved", seed);
}

}  // namespace
}  // namespace lamina::pipeline
