// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/call_hooks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include "lamina/base/error.h"
#include "tests/model/recorded_calls.h"

namespace lamina::model {
namespace {

using Function = std::function<at::Tensor(const at::Tensor&)>;

struct Hooked {
  std::shared_ptr<RecordedCalls> recorded = std::make_shared<RecordedCalls>();
  CallHooks hooks;
  Hooked() {
    hooks.add(recorded, {"a", "b"});
    hooks.number({"", "a", "b", "c"});
  }

  // A module that is called here.
  Function module(std::int64_t number, Function forward) {
    return [this, number, forward = std::move(forward)](const at::Tensor& x) {
      const auto call = hooks.begin(base::ModuleId(number), /*remote=*/false);
      auto y = forward(x);
      call->end(std::vector{y});
      return y;
    };
  }
};

at::Tensor weight(double value = 2) { return at::mul(at::ones({2}), value).set_requires_grad(true); }
void backward(const at::Tensor& y) { torch::autograd::backward({y.sum()}, {}); }

TEST(CallHooks, AreThoseOfTheModulesTheyWereAddedTo) {
  Hooked hooked;
  EXPECT_TRUE(hooked.hooks.has(base::ModuleId(1)));
  EXPECT_FALSE(hooked.hooks.has(base::ModuleId(3)));
  EXPECT_FALSE(CallHooks().has(base::ModuleId(1)));
  hooked.hooks.add(hooked.recorded, {"none"});
  EXPECT_THROW(hooked.hooks.number({"", "a", "b"}), base::UsageError);
}

TEST(CallHooks, LeaveOthersWhereOneIsRemoved) {
  Hooked hooked;
  const auto other = std::make_shared<RecordedCalls>();
  hooked.hooks.add(other, {"b"});
  hooked.hooks.number({"", "a", "b"});
  hooked.hooks.remove(hooked.recorded);
  EXPECT_FALSE(hooked.hooks.has(base::ModuleId(1)));
  EXPECT_TRUE(hooked.hooks.has(base::ModuleId(2)));
  hooked.hooks.remove(other);
  EXPECT_FALSE(hooked.hooks.has(base::ModuleId(2)));
  hooked.hooks.number({"", "a", "b"});
  EXPECT_FALSE(hooked.hooks.has(base::ModuleId(1)));
}

TEST(CallHooks, AreToldOfNestedCallsForwardAndBackward) {
  Hooked hooked;
  const auto w = weight(), v = weight(3);
  const auto inner = hooked.module(2, [&](const at::Tensor& x) { return at::sin(x * w); });
  const auto outer = hooked.module(1, [&](const at::Tensor& x) { return at::exp(inner(at::exp(x))) * v; });
  for (const bool differentiable : {true, false}) {
    const auto x = at::ones({2}).set_requires_grad(differentiable);
    const auto y = outer(x);
    EXPECT_EQ(hooked.recorded->take(), "a( b( )b )a");
    backward(y * 2);
    EXPECT_EQ(hooked.recorded->take(), "a[ b[ ]b ]a") << "x.requires_grad " << differentiable;
  }
}

TEST(CallHooks, EndABackwardWhenTheGradientsOfTheCallsParametersAreThere) {
  struct Looks : CallHook {
    explicit Looks(at::Tensor parameter) : parameter(std::move(parameter)) {}
    void before_backward(const ModuleCall&) override { before = parameter.grad().defined(); }
    void after_backward(const ModuleCall&) override { after = parameter.grad().defined(); }
    at::Tensor parameter;
    bool before = true, after = false;
  };
  const auto w = weight();
  const auto looks = std::make_shared<Looks>(w);
  Hooked hooked;
  hooked.hooks.add(looks, {"b"});
  hooked.hooks.number({"", "a", "b"});
  const auto first = hooked.module(2, [&](const at::Tensor& x) { return at::sin(at::exp(x * w)); });
  backward(at::exp(hooked.module(1, [](const at::Tensor& x) { return at::exp(x); })(first(at::ones({2})))));
  EXPECT_FALSE(looks->before);
  EXPECT_TRUE(looks->after);
  EXPECT_EQ(hooked.recorded->take(), "b( )b a( )a a[ ]a b[ ]b");
}

TEST(CallHooks, TellSeveralCallsOfAModuleApart) {
  Hooked hooked;
  const auto w = weight();
  const auto module = hooked.module(1, [&](const at::Tensor& x) { return at::sin(x * w); });
  backward(module(at::exp(module(at::ones({2})))));
  EXPECT_EQ(hooked.recorded->take(), "a( )a a( )a a[ ]a a[ ]a");
}

TEST(CallHooks, AreToldOfEachBackwardThroughOneCall) {
  Hooked hooked;
  const auto w = weight();
  const auto y = hooked.module(1, [&](const at::Tensor& x) { return at::sin(x * w); })(at::ones({2}));
  hooked.recorded->take();
  torch::autograd::backward({y.sum()}, {}, /*retain_graph=*/true);
  backward(y);
  EXPECT_EQ(hooked.recorded->take(), "a[ ]a a[ ]a");
}

TEST(CallHooks, ChangeNoNumberAndNoTensor) {
  for (const bool with : {false, true}) {
    Hooked hooked;
    const auto w = weight();
    at::Tensor kept;
    const Function plain = [&](const at::Tensor& x) { return kept = (x * w).view({1, 2}); };
    const auto x = weight(5);
    const auto y = with ? hooked.module(1, plain)(x) : plain(x);
    EXPECT_TRUE(y.is_same(kept));
    y.mul_(y.detach().clone());  // a view that is written to
    backward(y);
    EXPECT_TRUE(w.grad().equal(at::mul(at::ones({2}), 50))) << with;
    EXPECT_TRUE(x.grad().equal(at::mul(at::ones({2}), 20))) << with;
    EXPECT_EQ(hooked.recorded->take(), with ? "a( )a a[ ]a" : "");
  }
}

TEST(CallHooks, AreToldOfNoBackwardWhereThereIsNone) {
  Hooked hooked;
  const auto w = weight();
  const auto module = hooked.module(1, [&](const at::Tensor& x) { return at::sin(x * w); });
  {
    const at::NoGradGuard no_grad;
    module(at::ones({2}));
  }
  const auto identity = hooked.module(2, [](const at::Tensor& x) { return x; });
  EXPECT_TRUE(identity(w).is_same(w));
  backward(identity(w * 2));
  EXPECT_EQ(hooked.recorded->take(), "a( )a b( )b b( )b");
}

TEST(CallHooks, EndWhatTheyHaveBegunWhereACallFails) {
  Hooked hooked;
  const auto w = weight();
  const auto fails = hooked.module(2, [](const at::Tensor&) -> at::Tensor { throw base::Error("it"); });
  EXPECT_THROW(hooked.module(1, fails)(w), base::Error);
  EXPECT_EQ(hooked.recorded->take(), "a( b( )b )a");

  struct Fails : CallHook {
    void before_forward(const ModuleCall&) override { throw base::Error("no"); }
  };
  hooked.hooks.add(std::make_shared<Fails>(), {"a"});
  hooked.hooks.number({"", "a", "b"});
  EXPECT_THROW(hooked.module(1, [](const at::Tensor& x) { return x; })(w), base::Error);
  EXPECT_EQ(hooked.recorded->take(), "a( )a");
}

TEST(CallHooks, EndAllThatHaveBegunWhereOneFailsAndTheEndOfAnotherToo) {
  struct Fails : CallHook {
    explicit Fails(bool begins) : begins(begins) {}
    void before_forward(const ModuleCall&) override {
      if (!begins) throw base::Error("the first");
    }
    void after_forward(const ModuleCall&) override { throw base::Error("the second"); }
    const bool begins;
  };
  Hooked hooked;
  for (const bool begins : {true, false}) hooked.hooks.add(std::make_shared<Fails>(begins), {"a"});
  hooked.hooks.number({"", "a", "b"});
  try {
    hooked.module(1, [](const at::Tensor& x) { return x; })(weight());
    FAIL() << "it has a hook that fails";
  } catch (const base::Error& error) {
    EXPECT_STREQ(error.what(), "the first");
  }
  EXPECT_EQ(hooked.recorded->take(), "a( )a");
}

TEST(CallHooks, EndABackwardThatFailsAtTheLatestWithItsGraph) {
  Hooked hooked;
  const auto w = weight();
  auto y = hooked.module(1, [&](const at::Tensor& x) {
    const auto inside = x * w;
    inside.register_hook([](const at::Tensor&) { throw base::Error("it"); });
    return at::sin(inside);
  })(at::ones({2}));
  EXPECT_ANY_THROW(backward(y));
  EXPECT_EQ(hooked.recorded->take(), "a( )a a[");
  y.reset();
  EXPECT_EQ(hooked.recorded->take(), "]a");
}

TEST(CallHooks, EndABackwardThatAsksForGivenGradients) {
  Hooked hooked;
  const auto w = weight();
  const auto y = hooked.module(1, [&](const at::Tensor& x) { return at::sin(x * w); })(at::ones({2}));
  torch::autograd::grad({y.sum()}, {w});
  EXPECT_EQ(hooked.recorded->take(), "a( )a a[ ]a");
  EXPECT_FALSE(w.grad().defined());
}

}  // namespace
}  // namespace lamina::model
