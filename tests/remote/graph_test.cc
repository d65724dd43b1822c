// SPDX-License-Identifier: Apache-2.0
// The two ends of a remote call in autograd, joined without a transport: what a caller computes through them equals
// what it computes with the module itself.
#include "lamina/remote/graph.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/value/sent.h"

namespace lamina::remote {
namespace {

using value::List;
using value::Value;
using Module = std::function<Value(Value)>;

// Calls of a module as if it lived on another rank.
class Remote {
 public:
  explicit Remote(Module module) : module_(std::move(module)) {}

  Value operator()(const Value& arguments) {
    Value received = value::sent(arguments);
    auto callee = std::make_shared<CalleeGraph>(received);
    const Value outputs = module_(std::move(received));
    callee->set_outputs(outputs);
    const auto run = [this, callee](const Tensors& gradients, const BackwardOptions& options, const GradientTargets&) {
      kept = options.keep_graph;
      received_gradients = gradients;
      return sent_gradients = callee->backward(gradients, options);
    };
    CallerGraph caller(arguments, "block", base::Rank(1), run);
    Value results = value::sent(outputs);
    caller.attach(results, callee->reached());
    return results;
  }

  bool kept = false;
  Tensors received_gradients, sent_gradients;

 private:
  Module module_;
};

at::Tensor leaf(double value = 2) { return at::full({3}, value, at::kDouble).set_requires_grad(true); }
at::Tensor tensor(const Value& value) { return value.as<at::Tensor>(); }
bool all_equal(const at::Tensor& tensor, double value) { return at::equal(tensor, at::full_like(tensor, value)); }

TEST(Graph, ACallHasTheGradientsOfTheModuleItself) {
  const auto weight = leaf(3), x = leaf();
  Remote remote([&](Value v) { return Value(tensor(v) * tensor(v) * weight); });
  tensor(remote(x * 1)).sum().backward();
  EXPECT_TRUE(all_equal(x.grad(), 12));
  EXPECT_TRUE(all_equal(weight.grad(), 4));
}

TEST(Graph, AnArgumentThatIsALeafGetsItsGradient) {
  const auto x = leaf();
  Remote remote([](Value v) { return Value(tensor(v) * 5); });
  tensor(remote(x)).sum().backward();
  tensor(remote(x)).sum().backward();
  EXPECT_TRUE(all_equal(x.grad(), 10));  // accumulated over two calls
}

TEST(Graph, AnUnusedOutputHasNoGradientAndNeitherHasWhatOnlyItNeeds) {
  const auto used = leaf(), unused = leaf(), x = leaf(), y = leaf();
  Remote remote([&](Value v) { return Value(List{{value::tensor_at(v, 0) * used, value::tensor_at(v, 1) * unused}}); });
  value::tensor_at(remote(List{{x, y}}), 0).sum().backward();
  ASSERT_EQ(remote.received_gradients.size(), 2);
  EXPECT_FALSE(remote.received_gradients[1].defined());
  EXPECT_FALSE(remote.sent_gradients.at(1).defined());
  EXPECT_TRUE(all_equal(x.grad(), 2));
  EXPECT_FALSE(y.grad().defined());
  EXPECT_FALSE(unused.grad().defined());
}

TEST(Graph, AnArgumentThatTheModuleDoesNotUseHasNoGradient) {
  const auto x = leaf(), ignored = leaf();
  Remote remote([&](Value v) { return Value(value::tensor_at(v, 0) * 2); });
  tensor(remote(List{{x, ignored}})).sum().backward();
  EXPECT_FALSE(ignored.grad().defined());
}

TEST(Graph, AnOutputMayBeTheArgumentItselfOrAParameterOrGivenTwice) {
  const auto weight = leaf(3), x = leaf();
  Remote remote([&](Value v) {
    const auto y = tensor(v) * weight;
    return Value(List{{tensor(v), weight, y, y}});
  });
  const auto outputs = remote(x * 1);
  EXPECT_TRUE(value::tensor_at(outputs, 2).is_same(value::tensor_at(outputs, 3)));
  at::Tensor sum = at::zeros({3}, at::kDouble);
  for (int i = 0; i < 4; ++i) sum = sum + value::tensor_at(outputs, i);
  sum.sum().backward();
  EXPECT_TRUE(all_equal(x.grad(), 1 + 2 * 3));
  EXPECT_TRUE(all_equal(weight.grad(), 1 + 2 * 2));
}

TEST(Graph, TheSameTensorTwiceAsArgumentGetsTheSumOfItsGradients) {
  const auto x = leaf();
  Remote remote([](Value v) { return Value(value::tensor_at(v, 0) * value::tensor_at(v, 1)); });
  const auto y = x * 1;
  tensor(remote(List{{y, y}})).sum().backward();
  EXPECT_TRUE(all_equal(x.grad(), 4));
}

TEST(Graph, IntegerOutputsAndDetachedOnesHaveNoHistory) {
  const auto x = leaf();
  Remote remote(
      [](Value v) { return Value(List{{tensor(v).argmax(), tensor(v) * 3, tensor(v).detach(), at::Tensor(), true}}); });
  const auto outputs = remote(List{{x, at::arange(2)}}.items[0]);
  EXPECT_FALSE(value::tensor_at(outputs, 0).requires_grad());
  EXPECT_FALSE(value::tensor_at(outputs, 2).requires_grad());
  value::tensor_at(outputs, 1).sum().backward();
  EXPECT_TRUE(all_equal(x.grad(), 3));
}

TEST(Graph, ArgumentsWithoutGradStillTrainTheModulesParameters) {
  const auto weight = leaf(3);
  Remote remote([&](Value v) { return Value(tensor(v) * weight); });
  tensor(remote(at::ones({3}, at::kDouble))).sum().backward();
  EXPECT_TRUE(all_equal(weight.grad(), 1));
}

TEST(Graph, WithoutGradAnywhereNothingIsKept) {
  Value arguments = at::ones({3});
  CalleeGraph callee(arguments);
  callee.set_outputs(tensor(arguments) * 2);
  EXPECT_FALSE(callee.differentiable());
}

TEST(Graph, AGradientFromALaterCallIsRefusedAfterABackwardThatFailedToo) {
  Value arguments = leaf();
  CalleeGraph callee(arguments);
  const auto kept = tensor(arguments) * 3, output = tensor(arguments) * 2;
  bool fails = true;
  output.register_hook([&](const at::Tensor&) {
    if (fails) throw base::Error("it");
  });
  callee.set_outputs(output);
  const auto refuses = [&] { EXPECT_THROW(kept.sum().backward({}, /*retain_graph=*/true), base::UsageError); };
  refuses();
  EXPECT_THROW(callee.backward({at::ones({3}, at::kDouble)}, {.keep_graph = true}), base::Error);
  refuses();
  fails = false;
  EXPECT_TRUE(all_equal(callee.backward({at::ones({3}, at::kDouble)}, {}).at(0), 2));
}

TEST(Graph, AModuleMayWriteItsArgumentsInPlace) {
  const auto x = leaf();
  Remote remote([](Value v) { return Value(tensor(v).mul_(3)); });
  const auto before = x * 1;
  tensor(remote(before)).sum().backward();
  EXPECT_TRUE(all_equal(x.grad(), 3));
  EXPECT_TRUE(all_equal(before, 2));
}

TEST(Graph, ComplexAndExpandedGradientsPass) {
  const auto x = at::complex(at::ones({3}), at::ones({3})).set_requires_grad(true);
  Remote remote([](Value v) { return Value(tensor(v) * tensor(v).conj()); });
  at::real(tensor(remote(x))).sum().backward();
  EXPECT_TRUE(at::allclose(x.grad(), x.detach() * 2));
}

TEST(Graph, AKeptGraphMayBeRunAgainAndAgain) {
  const auto x = leaf(), weight = leaf(3);
  Remote remote([&](Value v) { return Value((tensor(v) * weight).exp()); });
  const auto loss = tensor(remote(x)).sum();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(remote.kept);
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  EXPECT_FALSE(remote.kept);
  EXPECT_TRUE(at::allclose(x.grad(), weight.detach() * (x.detach() * weight.detach()).exp() * 3));
}

TEST(Graph, AGraphThatWasNotKeptCannotBeRunAgain) {
  Remote remote([](Value v) { return Value(tensor(v).exp()); });
  const auto x = leaf();
  const auto y = tensor(remote(x));
  y.sum().backward();
  EXPECT_ANY_THROW(y.sum().backward());
}

TEST(Graph, CreateGraphThroughACallIsAUsageErrorThatNamesIt) {
  Remote remote([](Value v) { return Value(tensor(v).exp()); });
  const auto x = leaf();
  const auto loss = tensor(remote(x)).sum();
  try {
    loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
    FAIL();
  } catch (const base::UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("create_graph=True through block"), std::string::npos) << error.what();
  }
}

TEST(Graph, WhatTheOtherEndThrowsArrivesAsItWas) {
  const auto x = leaf();
  const auto fail = [](const Tensors&, const BackwardOptions&, const GradientTargets&) -> Tensors {
    throw base::TimeoutError("no answer");
  };
  CallerGraph caller(x, "block", base::Rank(1), fail);
  Value output = leaf();
  caller.attach(output, "1");
  EXPECT_THROW(tensor(output).sum().backward(), base::TimeoutError);
}

TEST(Graph, GradientsOfAnotherCallAreABug) {
  Value arguments = leaf();
  CalleeGraph callee(arguments);
  callee.set_outputs(tensor(arguments) * 2);
  EXPECT_THROW(callee.backward({}, {}), base::InternalError);
  const auto x = leaf();
  const auto nothing = [](const Tensors&, const BackwardOptions&, const GradientTargets&) { return Tensors(); };
  CallerGraph caller(x, "block", base::Rank(1), nothing);
  Value output = leaf();
  caller.attach(output, "1");
  EXPECT_THROW(tensor(output).sum().backward(), base::InternalError);
}

TEST(RunBackward, ScalesWhatItIsGivenAndCountsALossAsOne) {
  const auto x = leaf(), y = leaf();
  run_backward({(x * 1).sum(), y * 1}, {at::Tensor(), at::full({3}, 6.0, at::kDouble)}, 0.5);
  EXPECT_TRUE(all_equal(x.grad(), 0.5));
  EXPECT_TRUE(all_equal(y.grad(), 3));
}

TEST(RunBackward, OfATensorWithoutGraphOrOfSeveralElementsWithoutGradientIsAUsageError) {
  EXPECT_THROW(run_backward({at::ones({})}, {}, 1), base::UsageError);
  EXPECT_THROW(run_backward({at::Tensor()}, {}, 1), base::UsageError);
  EXPECT_THROW(run_backward({leaf() * 1}, {}, 1), base::UsageError);
}

}  // namespace
}  // namespace lamina::remote
