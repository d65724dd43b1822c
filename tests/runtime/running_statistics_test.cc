// SPDX-License-Identifier: Apache-2.0
// BatchNorm's running statistics are the plain loop's in every order of arrival.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::runtime {
namespace {

using value::Value;

constexpr int kMicrobatches = 5, kChannels = 3;

// Norms as torch's module does.
struct Norm {
  explicit Norm(std::optional<double> momentum) : momentum(momentum) {}

  at::Tensor operator()(const at::Tensor& x, bool training = true) {
    double factor = momentum.value_or(0);
    if (training) {
      const at::NoGradGuard no_grad;
      count += 1;
      if (!momentum) factor = 1 / count.item<double>();
    }
    return at::batch_norm(x, {}, {}, mean, var, training, factor, 1e-5, false);
  }
  BatchNorm tracked() const { return {"norm", mean, var, count, momentum}; }
  at::Tensor state() const { return at::cat({mean, var, count.to(at::kDouble).view(1)}); }

  std::optional<double> momentum;
  at::Tensor mean = at::zeros(kChannels, at::kDouble), var = at::ones(kChannels, at::kDouble),
             count = at::zeros({}, at::kLong);
};

at::Tensor input(std::int64_t microbatch) {
  const auto wave = at::arange(4 * kChannels, at::kDouble).view({4, kChannels});
  return at::sin(wave * (1.3 + 0.7 * static_cast<double>(microbatch))) * static_cast<double>(2 + microbatch);
}

struct Options {
  std::string schedule;
  std::uint64_t seed = 0;
  int active = 3;
  bool deterministic = false;
  std::optional<double> momentum = 0.1;
};

// Rank 1 has `near`, which rank 2's `far` calls as well, and its norm.
class Model {
 public:
  explicit Model(const Options& options)
      : norm(options.momentum),
        frozen(0.0),
        pipeline(3, options.schedule, options.seed, options.active, options.deterministic) {
    near = pipeline.add(
        "near", 1, [this](pipeline::Job&) { return [this](Value x) { return Value(forward(x.as<at::Tensor>())); }; });
    far = pipeline.add("far", 2, [this](pipeline::Job& job) {
      return [this, &job](Value x) { return job.call(near, Value(x.as<at::Tensor>() * 3)); };
    });
    reads = pipeline.add("reads", 1, [this](pipeline::Job&) {
      return [this](Value x) {
        last_read = norm(x.as<at::Tensor>(), /*training=*/false);
        return Value(last_read);
      };
    });
    if (options.deterministic) {
      for (int rank = 0; rank < 3; ++rank) pipeline.job(rank).set_order({}, false);
    }
    pipeline.job(1).set_statistics({norm.tracked(), frozen.tracked()});
  }

  at::Tensor forward(const at::Tensor& x) { return norm(frozen(x), training); }

  // Some microbatches call it once more.
  template <class Call>
  at::Tensor body(std::int64_t microbatch, const Call& call) {
    auto y = call(far, call(near, input(microbatch).set_requires_grad(true)));
    if (microbatch % 2 == 0) y = call(near, y);
    return y.pow(3).sum();
  }

  // The step's error.
  std::string step() {
    const auto outcomes = pipeline.step(kMicrobatches, [this](base::Microbatch microbatch) {
      most_under_way = std::max<int>(most_under_way, ++under_way);
      const auto loss = body(microbatch.value, [this](base::ModuleId id, const at::Tensor& x) {
        return pipeline.job(0).call(id, x).as<at::Tensor>();
      });
      pipeline.job(0).backward({loss}, {}, 1);
      if (microbatch.value == fails_in) throw base::UsageError("a microbatch fails");
      if (evaluates) pipeline.job(0).call(reads, input(microbatch.value));
      --under_way;
      return Value();
    });
    return pipeline::message_of(outcomes.front().error);
  }

  void plain_step() {
    for (int i = 0; i < kMicrobatches; ++i) {
      body(i, [this](base::ModuleId id, const at::Tensor& x) { return forward(id == far ? x * 3 : x); });
      if (evaluates) last_read = norm(input(i), /*training=*/false);
    }
  }

  Norm norm, frozen;
  bool training = true, evaluates = false;
  std::int64_t fails_in = -1;
  at::Tensor last_read;
  base::ModuleId near, far, reads;
  std::atomic<int> under_way = 0, most_under_way = 0;
  pipeline::Pipeline pipeline;
};

void expect_near(const at::Tensor& a, const at::Tensor& b, const std::string& where) {
  EXPECT_LE((a - b).abs().max().item<double>(), 1e-12 * std::max(1.0, b.abs().max().item<double>())) << where;
}

// LAMINA_SOAK multiplies the seeds.
std::uint64_t seeds() { return std::getenv("LAMINA_SOAK") != nullptr ? 5000 : 25; }

class RunningStatisticsOf : public testing::TestWithParam<std::tuple<const char*, std::optional<double>>> {};

TEST_P(RunningStatisticsOf, AreThoseOfThePlainLoopInEveryOrderOfArrival) {
  const auto& [schedule, momentum] = GetParam();
  for (std::uint64_t seed = 0; seed < seeds() && !HasFailure(); ++seed) {
    Model model({.schedule = schedule, .seed = seed, .deterministic = seed % 2 == 0, .momentum = momentum});
    Model plain({.schedule = schedule, .momentum = momentum});
    for (int step = 0; step < 2; ++step) {
      ASSERT_EQ(model.step(), "");
      plain.plain_step();
    }
    expect_near(model.norm.state(), plain.norm.state(), base::str("seed ", seed));
    EXPECT_TRUE(at::equal(model.frozen.state(), plain.frozen.state())) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, RunningStatisticsOf,
                         testing::Combine(testing::Values("simple", "interleaved"),
                                          testing::Values(std::optional<double>(0.1), std::nullopt)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + (std::get<1>(info.param) ? "" : "Cumulative");
                         });

TEST(RunningStatistics, AreBoundToNoOrderOfMicrobatchesInADeterministicJob) {
  Model model({.schedule = "interleaved", .deterministic = true});
  ASSERT_EQ(model.step(), "");
  EXPECT_GT(model.most_under_way, 1);
}

TEST(RunningStatistics, OfAnEvaluationAreReadAndStay) {
  Model model({.schedule = "interleaved"});
  ASSERT_EQ(model.step(), "");
  const auto before = model.norm.state();
  model.training = false;
  model.evaluates = true;
  ASSERT_EQ(model.step(), "");
  EXPECT_TRUE(at::equal(model.norm.state(), before));
  bool read = false;  // by whichever microbatch came last
  for (int i = 0; i < kMicrobatches; ++i) read = read || at::equal(model.last_read, model.norm(input(i), false));
  EXPECT_TRUE(read);
}

TEST(RunningStatistics, ThatAnEvaluationWouldMissAreAnError) {
  Model model({.schedule = "interleaved"});
  model.evaluates = true;
  EXPECT_NE(model.step().find("norm runs in training and in evaluation mode in one step"), std::string::npos);
  model.evaluates = false;
  EXPECT_EQ(model.step(), "");
}

TEST(RunningStatistics, AreSeenByEvaluationsOfTheSameStepWhereMicrobatchesFollowEachOther) {
  Model model({.schedule = "interleaved", .active = 1}), plain({.schedule = "interleaved"});
  for (auto* one : {&model, &plain}) one->evaluates = true;
  ASSERT_EQ(model.step(), "");
  plain.plain_step();
  expect_near(model.norm.state(), plain.norm.state(), "state");
  expect_near(model.last_read, plain.last_read, "evaluation");
}

TEST(RunningStatistics, OfAFailedStepAreDropped) {
  Model model({.schedule = "interleaved"});
  ASSERT_EQ(model.step(), "");
  const auto before = model.norm.state();
  model.fails_in = 3;
  EXPECT_EQ(model.step(), "a microbatch fails");
  EXPECT_TRUE(at::equal(model.norm.state(), before));
}

// Without a job: microbatches that take turns.
class Turns : public testing::Test {
 protected:
  void begin() { statistics_.begin({norm_.tracked()}); }
  RunningStatistics statistics_;
  Norm norm_{0.1};
};

TEST_F(Turns, KeepWhatATensorSaysOfItself) {
  const auto view = norm_.mean.view({1, kChannels});
  const auto version = norm_.mean._version();
  const void* memory = norm_.mean.data_ptr();
  begin();
  statistics_.turn_of(base::Microbatch(0));
  const auto inside = norm_.mean.detach();
  norm_(input(0));
  statistics_.end(true);
  EXPECT_EQ(norm_.mean.data_ptr(), memory);
  EXPECT_EQ(norm_.mean._version(), version);
  EXPECT_TRUE(at::equal(view[0], norm_.mean) && at::equal(inside, norm_.mean));
  EXPECT_GT(norm_.mean.abs().max().item<double>(), 0);
}

TEST_F(Turns, FoldWhatAClassDoesNotCountAsOneCall) {
  Norm plain(0.1);
  begin();
  for (int i : {2, 0, 1}) {
    statistics_.turn_of(base::Microbatch(i));
    norm_.mean.mul_(0.9).add_(0.1 * i);
  }
  statistics_.end(true);
  for (int i : {0, 1, 2}) plain.mean.mul_(0.9).add_(0.1 * i);
  expect_near(norm_.state(), plain.state(), "");
}

TEST_F(Turns, FoldAResetAsWhatForgetsTheMicrobatchesBefore) {
  Norm plain(0.1);
  for (auto* norm : {&norm_, &plain}) norm->count.fill_(100);
  const auto body = [](Norm& norm, int microbatch) {
    if (microbatch == 1) {
      norm.mean.zero_();
      norm.count.zero_();
    }
    norm(input(microbatch));
  };
  begin();
  for (int i : {2, 1, 0}) {
    statistics_.turn_of(base::Microbatch(i));
    body(norm_, i);
  }
  statistics_.end(true);
  for (int i : {0, 1, 2}) body(plain, i);
  expect_near(norm_.mean, plain.mean, "");
  EXPECT_EQ(norm_.count.item<int>(), 2);
}

}  // namespace
}  // namespace lamina::runtime
