// SPDX-License-Identifier: Apache-2.0
// Gradients that are references are the gradients of the plain model.
#include <torch/csrc/autograd/autograd.h>

#include "tests/pipeline/reference_fixture.h"
#include "tests/soak.h"
#include "tests/value/sent.h"

namespace lamina::pipeline {
namespace {

using value::is_pending;
using value::Value;

void expect_all(const at::Tensor& tensor, double number) {
  ASSERT_TRUE(tensor.defined());
  EXPECT_TRUE(at::equal(tensor, at::full_like(tensor, number))) << tensor << number;
}

class Schedules : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, Schedules, testing::Values("simple", "interleaved"));

TEST_P(Schedules, AParameterMayBeAnArgumentOfARemoteCallInManyMicrobatches) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(40, 10) && !HasFailure(); ++seed) {
    Model model(3, GetParam(), seed);
    const auto weight = leaf(2), inner_weight = leaf(3);
    const auto inner = model.add_scaling("inner", 2, inner_weight);
    const auto module = model.add("module", 1, [inner](Job& job) {
      return [&job, inner](Value x) { return job.call(inner, tensor_in(x) * 1); };
    });
    for (int step = 0; step < 3; ++step) {
      weight.mutable_grad().reset();
      model.run(8, [&](base::Microbatch) {
        const auto y = model.call(inner, model.call(module, weight));  // the leaf itself
        model.backward((y + model.call(inner, weight)).sum());
      });
      expect_all(weight.grad(), 8 * (9 + 3));
    }
  }
}

TEST_P(Schedules, OfAResultThatIsUsedTwiceAreAddedByItsOwner) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(20, 6) && !HasFailure(); ++seed) {
    Model model(4, GetParam(), seed);
    const auto weight = leaf(2), left_weight = leaf(3), right_weight = leaf(5), x = leaf(1);
    const auto top = model.add_scaling("top", 1, weight);
    const auto left = model.add_scaling("left", 2, left_weight);
    const auto right = model.add_scaling("right", 3, right_weight);
    for (int step = 0; step < 4; ++step) {
      for (const auto& leaf : {weight, left_weight, right_weight, x}) leaf.mutable_grad().reset();
      model.traffic().clear();
      model.run(1, [&](base::Microbatch) {
        const auto y = model.call(top, x * 1);
        model.backward((model.call(left, y) + model.call(right, y)).sum());
      });
      expect_all(x.grad(), 16);
      expect_all(weight.grad(), 8);
      expect_all(left_weight.grad(), 2);
      expect_all(right_weight.grad(), 2);
      if (step < 2) continue;
      EXPECT_EQ(model.traffic().elements(2, 1), 3);
      EXPECT_EQ(model.traffic().elements(3, 1), 3);
      EXPECT_EQ(model.traffic().count(remote::kAsk), 0);
    }
  }
}

TEST(ReferenceGradients, ReachHooksAndRetainGradAndAutogradGrad) {
  Model model(3, "simple");
  const auto weight = leaf(2), after = leaf(3), x = leaf(1);
  const auto first = model.add_scaling("first", 1, weight);
  const auto second = model.add_scaling("second", 2, after);
  at::Tensor kept;
  for (int step = 0; step < 3; ++step) {
    for (const auto& leaf : {weight, after, x}) leaf.mutable_grad().reset();
    model.run(1, [&](base::Microbatch) {
      const auto y = model.call(first, x * 1);
      int calls = 0;
      y.register_hook([&](const at::Tensor& gradient) {
        ++calls;
        kept = gradient;
        return gradient * 2;
      });
      const auto z = model.call(second, y);
      const auto asked = torch::autograd::grad({z.sum()}, {y}, {}, /*retain_graph=*/true);
      expect_all(asked[0], 6);
      EXPECT_FALSE(weight.grad().defined());  // the owner's parameters are untouched
      EXPECT_FALSE(after.grad().defined());
      y.retain_grad();
      model.backward(z.sum());
      EXPECT_EQ(calls, 2);
      expect_all(y.grad(), 6);
      expect_all(x.grad(), 12);
    });
    expect_all(weight.grad(), 6);
    expect_all(after.grad(), 2);
    expect_all(kept, 3);  // after the step too
  }
}

TEST(ReferenceGradients, AHookOnAResultThatOtherResultsDependOnIsRefusedWhereItWouldNotSeeThem) {
  Model model(2, "simple");
  const auto weight = leaf(2);
  const auto module = model.add("module", 1, [&](Job&) {
    return [&](Value v) {
      const auto hidden = tensor_in(v) * weight;
      return Value(value::Tuple{{hidden, (hidden * 3).sum()}});
    };
  });
  enum class Watch { kNothing, kKept, kHook, kHookOnLoss };
  for (int step = 0; step < 3; ++step) {
    for (const auto watch : {Watch::kNothing, Watch::kKept, Watch::kHook, Watch::kHookOnLoss}) {
      for (const bool outside : {false, true}) {
        const auto outcomes = model.attempt(1, [&](base::Microbatch) {
          const auto results = model.job(0).call(module, leaf(1) * 1).as<value::Tuple>();
          const auto hidden = tensor_in(results.items[0]), loss = tensor_in(results.items[1]);
          at::Tensor seen;
          const auto see = [&seen](const at::Tensor& gradient) { seen = gradient; };
          if (watch == Watch::kKept) hidden.retain_grad();
          if (watch == Watch::kHook) hidden.register_hook(see);
          if (watch == Watch::kHookOnLoss) loss.register_hook(see);
          model.backward(outside ? (hidden * 5).sum() : loss);
          if (watch == Watch::kKept) expect_all(hidden.grad(), 5);
          if (watch == Watch::kHook) expect_all(seen, 5);
          if (watch == Watch::kHookOnLoss && !outside) {
            EXPECT_EQ(seen.item<double>(), 1);
          }
        });
        const bool refused = !outside && (watch == Watch::kKept || watch == Watch::kHook);
        for (const auto& outcome : outcomes) {
          const auto message = message_of(outcome.error);
          EXPECT_EQ(message.find("other results of that module depend on it") != std::string::npos, refused) << message;
          EXPECT_EQ(message.empty(), !refused) << message;
        }
      }
    }
  }
}

TEST(ReferenceGradients, AHookMayKeepAReferenceOrASumOfThemBeyondTheStep) {
  Model model(4, "simple");
  const auto x = leaf(1);
  const auto first = model.add_scaling("first", 1, leaf(2));
  const auto left = model.add_scaling("left", 2, leaf(3)), right = model.add_scaling("right", 3, leaf(5));
  for (int step = 0; step < 3; ++step) {
    at::Tensor kept;
    model.run(1, [&](base::Microbatch) {
      const auto y = model.call(first, x * 1);
      y.register_hook([&](const at::Tensor& gradient) { kept = gradient; });
      model.backward((model.call(left, y) + model.call(right, y)).sum());
    });
    expect_all(kept, 8);
  }
}

TEST(ReferenceGradients, ThatDoNotExistStayUndefined) {
  Model model(3, "simple");
  const auto used = leaf(2), unused = leaf(3), x = leaf(1), ignored = leaf(1);
  const auto two = model.add("two", 1, [&](Job&) {
    return
        [&](Value v) { return Value(value::List{{value::tensor_at(v, 0) * used, value::tensor_at(v, 0) * unused}}); };
  });
  const auto after = model.add_scaling("after", 2, leaf(5));
  for (int step = 0; step < 3; ++step) {
    used.mutable_grad().reset();
    x.mutable_grad().reset();
    model.run(1, [&](base::Microbatch) {
      const auto both = model.job(0).call(two, value::List{{x * 1, ignored * 1}});
      model.backward(model.call(after, value::tensor_at(both, 0)).sum());
    });
    expect_all(used.grad(), 5);
    expect_all(x.grad(), 10);
    EXPECT_FALSE(unused.grad().defined());
    EXPECT_FALSE(ignored.grad().defined());
  }
}

TEST(ReferenceGradients, OfAnotherPatternOfOutputsAreLearnedForThemselves) {
  Model model(3, "simple");
  const auto a = leaf(2), b = leaf(3), x = leaf(1), y = leaf(1);
  const auto two = model.add("two", 1, [&](Job&) {
    return [&](Value v) { return Value(value::List{{value::tensor_at(v, 0) * a, value::tensor_at(v, 1) * b}}); };
  });
  for (int step = 0; step < 6; ++step) {
    for (const auto& leaf : {a, b, x, y}) leaf.mutable_grad().reset();
    const bool first = step % 3 != 1, second = step % 3 != 0;
    model.run(1, [&](base::Microbatch) {
      const auto both = model.job(0).call(two, value::List{{x * 1, y * 1}});
      at::Tensor loss = at::zeros({}, at::kDouble);
      if (first) loss = loss + value::tensor_at(both, 0).sum();
      if (second) loss = loss + value::tensor_at(both, 1).sum();
      model.backward(loss);
    });
    EXPECT_EQ(x.grad().defined(), first);
    EXPECT_EQ(b.grad().defined(), second);
    if (first) expect_all(x.grad(), 2);
    if (second) expect_all(y.grad(), 3);
  }
}

TEST(ReferenceGradients, ABackwardMayBeAskedForBeforeItsForwardHasRun) {
  Model model(3, "simple");
  Gate gate;
  const auto weight = leaf(2), x = leaf(1);
  const auto slow = model.add_function("slow", 1, [&](const at::Tensor& v) {
    gate.pass();
    return v * weight;
  });
  for (int step = 0; step < 3; ++step) {
    if (step == 2) gate.shut();
    weight.mutable_grad().reset();
    model.run(1, [&](base::Microbatch) {
      const auto before = model.call(slow, x * 1);
      const auto asked = [&] { return torch::autograd::grad({before}, {x}, {at::ones({3}, at::kDouble)}); };
      std::thread opens([&] {
        while (model.traffic().count(remote::kBackward) <= step) std::this_thread::yield();
        gate.open();
      });
      expect_all(asked()[0], 2);
      opens.join();
    });
  }
}

TEST(ReferenceGradients, AGraphThatReachesIntoAnEarlierCallIsAnErrorAndNoLostGradient) {
  Model model(2, "simple");
  const auto weight = leaf(2), x = leaf(1);
  at::Tensor stash;
  const auto keeps = model.add_function("keeps", 1, [&](const at::Tensor& v) {
    const auto y = stash.defined() ? v * weight + stash : v * weight;
    stash = y;
    return y * 1;
  });
  for (int step = 0; step < 2; ++step) {
    stash.reset();
    const auto outcomes = model.attempt(1, [&](base::Microbatch) {
      const auto first = model.call(keeps, x * 1), second = model.call(keeps, x * 1);
      model.backward(second.sum());
      (void)first;
    });
    for (const auto& outcome : outcomes) {
      EXPECT_NE(message_of(outcome.error).find("detach"), std::string::npos) << message_of(outcome.error);
    }
  }
}

}  // namespace
}  // namespace lamina::pipeline
