// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/job.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>

#include "tests/pipeline/pipeline_fixture.h"

namespace lamina::pipeline {
namespace {

using value::Value;

at::Tensor tensor_of(const Value& tree) { return tree.as<at::Tensor>(); }

at::Tensor parameter(double value) { return at::full({3}, value, at::kDouble).set_requires_grad(true); }

// y = x * weight on rank `owner`.
base::ModuleId add_scaling(Pipeline& pipeline, const std::string& name, int owner, const at::Tensor& weight) {
  return pipeline.add(name, owner,
                      [weight](Job&) { return [weight](Value x) { return Value(tensor_of(x) * weight); }; });
}

struct Case {
  int ranks;
  std::string schedule;
  int microbatches;
};

class AnyLayout : public ::testing::TestWithParam<Case> {};

TEST_P(AnyLayout, ChainTrainsLikeOneDevice) {
  const auto& [ranks, schedule, microbatches] = GetParam();
  Pipeline pipeline(ranks, schedule);
  std::vector<at::Tensor> weights;
  std::vector<base::ModuleId> stages;
  for (int i = 0; i < ranks; ++i) {
    weights.push_back(parameter(2 + i));
    stages.push_back(add_scaling(pipeline, "stage" + std::to_string(i), i, weights.back()));
  }
  const auto input = at::arange(3, at::kDouble) + 1;
  const auto body = [&](base::Microbatch microbatch) {
    Value x = input * (microbatch.value + 1.0);
    for (auto stage : stages) x = pipeline.job(0).call(stage, x);
    const at::Tensor loss = tensor_of(x).sum();
    pipeline.job(0).backward({loss}, {}, 1.0 / microbatches);
    return Value(loss.detach());
  };
  for (int step = 0; step < 2; ++step) {
    const auto outcomes = pipeline.step(microbatches, body);
    for (const auto& outcome : outcomes) EXPECT_EQ(message_of(outcome.error), "");
    for (const auto& outcome : outcomes) ASSERT_EQ(outcome.outputs.size(), microbatches);
    EXPECT_TRUE(at::equal(tensor_of(outcomes.back().outputs[0]), tensor_of(outcomes.front().outputs[0])));
  }
  double product = 1;
  for (const auto& weight : weights) product *= weight[0].item<double>();
  for (const auto& weight : weights) {
    const auto expected = input * product / weight.detach() * ((microbatches + 1) / 2.0) * 2;  // two steps accumulate
    EXPECT_TRUE(at::allclose(weight.grad(), expected, 1e-12)) << weight.grad() << expected;
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, AnyLayout,
                         ::testing::Values(Case{1, "interleaved", 1}, Case{1, "simple", 4}, Case{2, "simple", 1},
                                           Case{2, "simple", 4}, Case{2, "interleaved", 4}, Case{3, "simple", 4},
                                           Case{3, "interleaved", 1}, Case{3, "interleaved", 8},
                                           Case{1, "zero_bubble", 4}, Case{2, "zero_bubble", 6},
                                           Case{3, "zero_bubble", 8}),
                         [](const auto& info) {
                           return info.param.schedule + "_" + std::to_string(info.param.ranks) + "x" +
                                  std::to_string(info.param.microbatches);
                         });

TEST(NestedCalls, ModulesCallEachOtherAcrossRanksInBothDirections) {
  Pipeline pipeline(2, "interleaved");
  const auto inner_weight = parameter(5), outer_weight = parameter(7);
  const auto inner = add_scaling(pipeline, "inner", 0, inner_weight);
  const auto outer = pipeline.add("outer", 1, [&, inner](Job& job) {
    return [&job, &outer_weight, inner](Value x) {
      const auto once = job.call(inner, tensor_of(x) * outer_weight);
      return Value(tensor_of(job.call(inner, once)) + tensor_of(x));
    };
  });
  const auto outcomes = pipeline.step(3, [&](base::Microbatch) {
    const auto loss = tensor_of(pipeline.job(0).call(outer, at::ones({3}, at::kDouble))).sum();
    pipeline.job(0).backward({loss}, {}, 1.0 / 3);
    return Value(loss.detach());
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(message_of(outcome.error), "");
  EXPECT_DOUBLE_EQ(tensor_of(outcomes[1].outputs[2]).item<double>(), 3 * (5 * 5 * 7 + 1));
  EXPECT_TRUE(at::allclose(outer_weight.grad(), at::full({3}, 25.0, at::kDouble)));
  EXPECT_TRUE(at::allclose(inner_weight.grad(), at::full({3}, 70.0, at::kDouble)));
}

TEST(Backward, EachRankLearnsWhetherThereWasOne) {
  Pipeline pipeline(2, "interleaved");
  const auto module = add_scaling(pipeline, "there", 1, parameter(3));
  enum class By { kNone, kTheJob, kTorch };
  for (const By by : {By::kNone, By::kTheJob, By::kNone, By::kTorch, By::kNone}) {
    const auto outcomes = pipeline.step(2, [&](base::Microbatch) {
      const auto loss = tensor_of(pipeline.job(0).call(module, at::ones({3}, at::kDouble))).sum();
      if (by == By::kTheJob) pipeline.job(0).backward({loss}, {}, 1.0 / 2);
      if (by == By::kTorch) loss.backward();
      return Value();
    });
    for (const auto& outcome : outcomes) {
      EXPECT_EQ(message_of(outcome.error), "");
      EXPECT_EQ(outcome.backward, by != By::kNone);
    }
  }
}

TEST(InPlace, AModuleMayWriteItsCallersArgumentAndTheCallerItsResult) {
  Pipeline pipeline(2, "interleaved");
  const auto weight = parameter(3);
  const auto module = pipeline.add(
      "in_place", 1, [&](Job&) { return [&](Value x) { return Value(tensor_of(x).mul_(weight).relu_()); }; });
  const auto input_weight = parameter(2);
  const auto outcomes = pipeline.step(2, [&](base::Microbatch) {
    const at::Tensor x = at::ones({3}, at::kDouble) * input_weight;
    at::Tensor y = tensor_of(pipeline.job(0).call(module, x));
    y.div_(2);
    EXPECT_TRUE(y.is_same(x));  // as it is when the module is here
    EXPECT_EQ(x[0].item<double>(), 3);
    pipeline.job(0).backward({y}, {at::ones({3}, at::kDouble)}, 1);
    return Value();
  });
  for (const auto& outcome : outcomes) EXPECT_EQ(message_of(outcome.error), "");
  EXPECT_TRUE(at::allclose(weight.grad(), at::full({3}, 2.0, at::kDouble)));
  EXPECT_TRUE(at::allclose(input_weight.grad(), at::full({3}, 3.0, at::kDouble)));
}

TEST(Failures, AModuleThatThrowsEndsTheStepOnAllRanksWithTheSameErrorAndTheJobGoesOn) {
  Pipeline pipeline(3, "interleaved");
  std::atomic<bool> bad = true;
  const auto fails = pipeline.add("fails", 2, [&](Job&) {
    return [&](Value x) -> Value {
      if (bad) throw std::runtime_error("the user's own message");
      return x;
    };
  });
  const auto through = pipeline.add(
      "through", 1, [fails](Job& job) { return [&job, fails](Value x) { return job.call(fails, std::move(x)); }; });
  const auto body = [&](base::Microbatch) { return pipeline.job(0).call(through, at::ones({2})); };
  for (const auto& outcome : pipeline.step(6, body)) {
    const auto text = message_of(outcome.error);
    EXPECT_NE(text.find("std::runtime_error on rank 2: the user's own message"), std::string::npos) << text;
  }
  bad = false;
  for (const auto& outcome : pipeline.step(6, body)) EXPECT_EQ(message_of(outcome.error), "");
}

TEST(Failures, ALostRankEndsTheStepOnEverySurvivorAndIsNamed) {
  Pipeline pipeline(3, "interleaved");
  const auto module = pipeline.add("stuck", 2, [&](Job&) {
    return [&](Value x) -> Value {
      pipeline.network().kill(base::Rank(2));
      return x;
    };
  });
  std::vector<std::string> texts(3);
  std::vector<std::thread> mains;
  for (int rank = 0; rank < 2; ++rank) {
    mains.emplace_back([&, rank] {
      try {
        pipeline.job(rank).run_step(
            {2, [&](base::Microbatch) { return pipeline.job(0).call(module, at::ones({2})); }, [] {}});
      } catch (const base::Error& error) {  // the other survivor may tell of it first
        texts[rank] = error.what();
      }
    });
  }
  std::thread dead([&] {
    try {
      pipeline.job(2).run_step({2, nullptr, [] {}});
    } catch (const std::exception&) {
    }
  });
  for (auto& main : mains) main.join();
  for (int rank = 0; rank < 2; ++rank) EXPECT_NE(texts[rank].find("rank 2 is lost"), std::string::npos) << texts[rank];
  const auto step = [&] { pipeline.job(0).run_step({1, [](base::Microbatch) { return Value(); }, [] {}}); };
  const auto known = base::Deadline::after(std::chrono::seconds(2));
  EXPECT_THROW(while (!known.expired()) step(), base::PeerError);
  pipeline.job(2).end(false);
  dead.join();
}

TEST(Usage, ARemoteModuleOutsideAStepIsAnErrorThatNamesIt) {
  Pipeline pipeline(2, "simple");
  const auto module = add_scaling(pipeline, "block.1", 1, parameter(1));
  try {
    pipeline.job(0).call(module, at::ones({3}));
    FAIL();
  } catch (const base::UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("block.1 lives on rank 1"), std::string::npos) << error.what();
  }
}

TEST(Replicas, ShareOutMicrobatchesOneMoreOrLess) {
  const auto shared_out = [](std::int64_t all, bool alike) {
    std::vector<int> each;
    for (int replica = 0; replica < 3; ++replica) {
      Pipeline pipeline(1, JobOptions{.replica = replica, .replicas = 3});
      pipeline.job(0).share_out(all, alike);
      EXPECT_EQ(pipeline.job(0).all_microbatches(), all);
      each.push_back(pipeline.job(0).microbatches());
    }
    return each;
  };
  EXPECT_EQ(shared_out(6, false), std::vector({2, 2, 2}));
  EXPECT_EQ(shared_out(5, false), std::vector({1, 2, 2}));
  EXPECT_EQ(shared_out(5, true), std::vector({2, 2, 2}));
  EXPECT_EQ(shared_out(2, false), std::vector({1, 1, 1})) << "each has one at least";
}

}  // namespace
}  // namespace lamina::pipeline
