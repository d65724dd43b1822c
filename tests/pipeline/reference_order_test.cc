// SPDX-License-Identifier: Apache-2.0
// Calls that return before they have run still happen as if they had run in the order of the program.
#include "tests/pipeline/reference_fixture.h"

namespace lamina::pipeline {
namespace {

using value::Value;

constexpr int kSeeds = 60;

TEST(ReferenceOrder, CallsOfAModuleThatKeepsStateRunInTheOrderInWhichTheyWereMade) {
  for (std::uint64_t seed = 0; seed < kSeeds && !testing::Test::HasFailure(); ++seed) {
    Model model(2, seed % 2 == 0 ? "simple" : "interleaved", seed);
    at::Tensor state;
    const auto keeps = model.add_function("keeps", 1, [&](const at::Tensor& x) {
      state = state * 2 + x;
      return state * 1;
    });
    for (int step = 0; step < 3; ++step) {
      state = at::zeros({1});
      model.run(1, [&](base::Microbatch) {
        std::vector<at::Tensor> results;
        for (int i = 1; i <= 5; ++i) results.push_back(model.call(keeps, at::full({1}, i)));
        double wanted = 0;
        for (int i = 1; i <= 5; ++i)
          EXPECT_EQ(results[i - 1].item<double>(), wanted = wanted * 2 + i) << "seed " << seed;
      });
    }
  }
}

TEST(ReferenceOrder, TheSameWhereTheFirstArgumentIsTheLastToArrive) {
  Model model(3, "simple");
  Gate gate;
  const auto slow = model.add_function("slow", 2, [&](const at::Tensor& x) {
    gate.pass();
    return x * 1;
  });
  at::Tensor state;
  const auto keeps = model.add_function("keeps", 1, [&](const at::Tensor& x) {
    state = state * 2 + x;
    return state * 1;
  });
  const auto other = model.add_function("other", 1, [](const at::Tensor& x) { return x + 1; });
  for (int step = 0; step < 3; ++step) {
    if (step == 2) gate.shut();
    state = at::zeros({1});
    model.run(1, [&](base::Microbatch) {
      const auto first = model.call(keeps, model.call(slow, at::ones({1})));
      const auto second = model.call(keeps, at::full({1}, 2));
      EXPECT_EQ(model.call(other, at::ones({1})).item<double>(), 2);  // waits for none of them
      gate.open();
      EXPECT_EQ(second.item<double>(), 4);
      EXPECT_EQ(first.item<double>(), 1);
    });
  }
}

// So a pipeline of several modules on a rank hands its first microbatch on as early as one of a single module does.
TEST(ReferenceOrder, WhatGoesOnWithAResultOnItsRankComesBeforeTheNextMicrobatch) {
  Model model(2, "interleaved");
  Gate gate;
  std::vector<std::string> order;
  const auto noted = [&](const std::string& name) {
    return model.add_function(name, 1, [&, name](const at::Tensor& x) {
      gate.pass();
      order.push_back(base::str(name, " of ", runtime::ExecutionContext::current()->microbatch()));
      return x * 1;
    });
  };
  const auto first = noted("first"), then = noted("then");
  for (int step = 0; step < 3; ++step) {
    if (step == 2) gate.shut();
    order.clear();
    model.run(2, [&](base::Microbatch microbatch) {
      const auto result = model.call(then, model.call(first, at::full({1}, microbatch.value)));
      model.mailbox(0).send(base::Rank(1), "asked", microbatch.value);
      if (step == 2 && microbatch.value == 1) {
        for (int i = 0; i < 2; ++i) model.mailbox(1).receive(base::Rank(0), "asked", {});
        gate.open();
      }
      EXPECT_EQ(result.item<std::int64_t>(), microbatch.value);
    });
  }
  EXPECT_EQ(order, (std::vector<std::string>{"first of 0", "then of 0", "first of 1", "then of 1"}));
}

TEST(ReferenceOrder, TheSameOfAChildWhoseParentIsCalledTwiceOnAnotherRank) {
  Model model(4, "simple");
  Gate gate;
  at::Tensor state;
  int calls = 0;
  const auto slow = model.add_function("slow", 3, [&](const at::Tensor& x) {
    gate.pass();
    return x * 1;
  });
  const auto keeps = model.add_function("keeps", 2, [&](const at::Tensor& x) {
    state = state * 2 + x;
    return state * 1;
  });
  const auto parent = model.add("parent", 1, [&](Job& job) {
    return [&, &job = job](Value x) { return job.call(keeps, ++calls % 2 == 1 ? job.call(slow, x) : x); };
  });
  const auto far = model.add_function("far", 2, [](const at::Tensor& x) { return x * 1; });
  const auto echo = model.add("echo", 1, [far](Job& job) { return [far, &job](Value x) { return job.call(far, x); }; });
  for (int step = 0; step < 4; ++step) {
    if (step == 3) gate.shut();
    state = at::zeros({1});
    model.run(1, [&](base::Microbatch) {
      const auto first = model.call(parent, at::ones({1})), second = model.call(parent, at::full({1}, 2));
      for (int i = 0; i < 10; ++i) EXPECT_EQ(model.call(echo, at::ones({1})).item<double>(), 1);
      gate.open();
      EXPECT_EQ(second.item<double>(), 4);
      EXPECT_EQ(first.item<double>(), 1);
    });
  }
}

TEST(ReferenceOrder, TwoBackwardsThroughOneCallRunOneAfterTheOther) {
  for (std::uint64_t seed = 0; seed < kSeeds && !testing::Test::HasFailure(); ++seed) {
    Model model(4, seed % 2 == 0 ? "simple" : "interleaved", seed);
    const auto before = leaf(2), inner_weight = leaf(3), after = leaf(5), x = leaf(1);
    const auto first = model.add_scaling("first", 1, before);
    const auto inner = model.add_scaling("inner", 3, inner_weight);
    const auto middle = model.add("middle", 2, [&, inner](Job& job) {
      return [&, inner](value::Value v) {
        const auto own = tensor_in(v) * after;
        return value::Value(tensor_in(job.call(inner, own * 1)) * own);
      };
    });
    for (int step = 0; step < 3; ++step) {
      for (const auto& weight : {before, inner_weight, after, x}) weight.mutable_grad().reset();
      model.run(2, [&](base::Microbatch) {
        const auto y = model.call(middle, model.call(first, x * 1));
        y.sum().backward({}, /*retain_graph=*/true);
        (y * 10).sum().backward();
      });
      const auto is = [&](const at::Tensor& weight, double wanted) {
        EXPECT_TRUE(at::equal(weight.grad(), at::full({3}, wanted, at::kDouble))) << "seed " << seed << weight.grad();
      };
      // y = 3 (5 * 2 x)^2, counted 11 times in each of two microbatches
      is(x, 22 * 600.0);
      is(before, 22 * 300.0);
      is(inner_weight, 22 * 100.0);
      is(after, 22 * 120.0);
    }
  }
}

TEST(ReferenceOrder, AResultIsWhatItWasWhenTheCallReturnedOrAnError) {
  for (std::uint64_t seed = 0; seed < kSeeds && !testing::Test::HasFailure(); ++seed) {
    Model model(2, "simple", seed);
    const auto counter = at::zeros({1});
    const auto counts = model.add_function("counts", 1, [&](const at::Tensor&) { return counter.add_(1); });
    const auto body = [&](base::Microbatch) {
      counter.zero_();
      const auto one = model.call(counts, at::ones({1})), two = model.call(counts, at::ones({1}));
      const bool late = value::is_pending(one);
      const double second = two.item<double>(), first = one.item<double>();
      EXPECT_EQ(second, 2);
      EXPECT_EQ(first, 1) << late;
    };
    for (int step = 0; step < 3; ++step) {
      for (const auto& outcome : model.attempt(1, body)) {
        const auto message = message_of(outcome.error);
        EXPECT_TRUE(message.empty() || message.find("set_dynamic") != std::string::npos) << message;
      }
    }
  }
}

}  // namespace
}  // namespace lamina::pipeline
