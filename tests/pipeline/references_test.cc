// SPDX-License-Identifier: Apache-2.0
// Results of remote calls stay where they are, and go straight from their maker to their reader.
#include "tests/pipeline/reference_fixture.h"
#include "tests/soak.h"

namespace lamina::pipeline {
namespace {

using value::is_pending;
using value::Value;

TEST(References, ACallLikeAnEarlierOneReturnsBeforeItHasRunAndOthersWait) {
  Model model(2, "simple");
  Gate gate;
  bool closed = false;
  const auto module = model.add_function("module", 1, [&](const at::Tensor& x) {
    gate.pass();
    return x * 2;
  });
  const auto body = [&](base::Microbatch) {
    const auto y = model.call(module, at::ones({3}));
    EXPECT_EQ(is_pending(y), closed);
    EXPECT_EQ(y.sizes(), at::IntArrayRef({3}));  // what it looks like is known without waiting
    EXPECT_EQ(is_pending(y), closed);
    gate.open();
    EXPECT_EQ(y.sum().item<float>(), 6);
  };
  model.run(1, body);
  closed = true;
  gate.shut();
  model.run(1, body);
  model.run(1, [&](base::Microbatch) { EXPECT_FALSE(is_pending(model.call(module, at::ones({4})))); });
}

// 0 calls a module of 1 and gives its result to one of 2.
struct Chain {
  explicit Chain(const std::string& schedule = "simple", std::uint64_t seed = 0) : model(3, schedule, seed) {
    first = model.add_scaling("first", 1, weight1);
    second = model.add_scaling("second", 2, weight2);
  }
  void forward_backward(base::Microbatch) {
    const auto y = model.call(second, model.call(first, at::ones({100}, at::kDouble)));
    model.backward(y.sum());
  }
  at::Tensor weight1 = leaf(2, 100), weight2 = leaf(3, 100);
  Model model;
  base::ModuleId first, second;
};

TEST(References, AResultThatIsPassedOnNeverVisitsTheCallerForwardOrBackward) {
  Chain chain;
  auto& traffic = chain.model.traffic();
  for (int step = 0; step < 4; ++step) {
    traffic.clear();
    chain.model.run(1, [&](base::Microbatch microbatch) { chain.forward_backward(microbatch); });
    const bool seen = step > 0;
    EXPECT_EQ(traffic.elements(1, 0), seen ? 0 : 100) << step;    // forward
    EXPECT_EQ(traffic.elements(1, 2), seen ? 100 : 0) << step;    // forward
    EXPECT_EQ(traffic.elements(2, 1), seen ? 100 : 0) << step;    // backward
    EXPECT_EQ(traffic.elements(2, 0), seen ? 100 : 200) << step;  // the loss is the caller's; at first a gradient too
    EXPECT_EQ(traffic.count(remote::kAsk), step == 1 ? 2 : 0) << step;
  }
  EXPECT_TRUE(at::equal(chain.weight1.grad(), at::full({100}, 12.0, at::kDouble)));
  EXPECT_TRUE(at::equal(chain.weight2.grad(), at::full({100}, 8.0, at::kDouble)));
}

TEST(References, ARouteThatIsWrongCostsNothingButBytesAndIsUnlearned) {
  Model model(4, "simple");
  const auto maker = model.add_function("maker", 1, [](const at::Tensor& x) { return x * 2; });
  const auto left = model.add_function("left", 2, [](const at::Tensor& x) { return x + 1; });
  const auto right = model.add_function("right", 3, [](const at::Tensor& x) { return x + 2; });
  bool goes_left = true;
  const auto step = [&] {
    model.traffic().clear();
    model.run(1, [&](base::Microbatch) {
      const auto y = model.call(goes_left ? left : right, model.call(maker, at::ones({100})));
      EXPECT_EQ(y.sum().item<float>(), goes_left ? 300 : 400);
    });
  };
  for (int i = 0; i < 4; ++i) step();
  goes_left = false;
  step();
  EXPECT_EQ(model.traffic().elements(1, 2), 100);  // sent for nothing
  for (int i = 0; i < 2; ++i) step();
  EXPECT_EQ(model.traffic().elements(1, 2), 0);
  EXPECT_EQ(model.traffic().elements(1, 3), 100);
  EXPECT_EQ(model.traffic().count(remote::kAsk), 0);
}

TEST(References, AResultThatOneRankReadsTwiceIsSentTwiceWithoutBeingAskedForAndIsTwoTensorsThere) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(20, 6); ++seed) {
    Model model(3, "simple", seed);
    const auto maker = model.add_scaling("maker", 1, leaf(2));
    const auto reader = model.add_scaling("reader", 2, leaf(1));
    const auto x = leaf(1);
    for (int step = 0; step < 4; ++step) {
      model.traffic().clear();
      x.mutable_grad().reset();
      model.run(1, [&](base::Microbatch) {
        const auto y = model.call(maker, x * 1);
        const auto a = model.call(reader, y), b = model.call(reader, y);
        EXPECT_EQ(b.sum().item<double>(), 6);
        model.backward((a + b).sum());
      });
      ASSERT_TRUE(at::equal(x.grad(), at::full({3}, 4.0, at::kDouble))) << "seed " << seed << x.grad();
    }
    EXPECT_EQ(model.traffic().count(remote::kAsk), 0);
  }
}

TEST(References, AModuleThatReturnsItsChildsResultDoesNotCarryIt) {
  Model model(3, "simple");
  const auto child = model.add_scaling("child", 2, leaf(2, 100));
  const auto parent = model.add(
      "parent", 1, [child](Job& job) { return [&job, child](Value x) { return job.call(child, std::move(x)); }; });
  for (int step = 0; step < 4; ++step) {
    model.traffic().clear();
    model.run(1, [&](base::Microbatch) {
      EXPECT_EQ(model.call(parent, at::ones({100}, at::kDouble)).sum().item<double>(), 200);
    });
    if (step < 2) continue;
    EXPECT_EQ(model.traffic().elements(1, 0), 0) << step;
    EXPECT_EQ(model.traffic().elements(2, 1), 0) << step;
    EXPECT_EQ(model.traffic().elements(2, 0), 100) << step;
  }
}

TEST(References, ARequestWhoseInputsAreOnTheirWayTakesNoSlot) {
  Model model(3, "simple");
  Gate gate;
  const auto slow = model.add_function("slow", 1, [&](const at::Tensor& x) {
    gate.pass();
    return x * 2;
  });
  const auto waits = model.add_function("waits", 2, [](const at::Tensor& x) { return x + 1; });
  const auto ready = model.add_function("ready", 2, [](const at::Tensor& x) { return x + 2; });
  const auto body = [&](base::Microbatch) {
    const auto late = model.call(waits, model.call(slow, at::ones({3})));
    EXPECT_EQ(model.call(ready, at::ones({3})).sum().item<float>(), 9);
    gate.open();  // only now, and yet the other was served
    EXPECT_EQ(late.sum().item<float>(), 9);
  };
  model.run(1, body);
  gate.shut();
  model.run(1, body);
}

TEST(References, IndependentBranchesOfOneMicrobatchRunOnTwoRanksAtTheSameTime) {
  for (const auto* schedule : {"simple", "interleaved"}) {
    Model model(3, schedule);
    Gate here, there;
    const auto left = model.add_function("left", 1, [&](const at::Tensor& x) {
      here.open();
      there.pass();
      return x * 2;
    });
    const auto right = model.add_function("right", 2, [&](const at::Tensor& x) {
      there.open();
      here.pass();
      return x * 3;
    });
    const auto body = [&](base::Microbatch) {
      const auto a = model.call(left, at::ones({3}));
      const auto b = model.call(right, at::ones({3}));
      EXPECT_EQ((a + b).sum().item<float>(), 15);
    };
    model.run(1, body);
    here.shut();
    there.shut();
    model.run(1, body);
  }
}

}  // namespace
}  // namespace lamina::pipeline
