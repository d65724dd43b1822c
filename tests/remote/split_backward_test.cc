// SPDX-License-Identifier: Apache-2.0
// A backward in two parts: it has the bits of the whole one, runs and hears everything once, and keeps little between
// the parts.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <map>
#include <memory>

#include "lamina/base/error.h"
#include "lamina/remote/graph.h"

namespace lamina::remote {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using value::List;
using value::Value;

at::Tensor drawn(at::IntArrayRef sizes, double scale = 0.5) { return at::randn(sizes).mul_(scale); }

// A module: what it computes with its parameters and an argument.
struct Module {
  Tensors parameters;
  std::function<Tensors(const Tensors& p, const at::Tensor& x)> forward;
};

// A user's function of an argument and a weight, which counts its backwards.
struct Scale : Function<Scale> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    ++backwards;
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(0)};
  }
  static inline int backwards = 0;
};

using at::linear;

Module mlp_with_dropout() {
  return {{drawn({16, 8}), drawn({16}), drawn({8, 16})}, [](const Tensors& p, const at::Tensor& x) -> Tensors {
            return {linear(at::dropout(at::relu(at::linear(x, p[0], p[1])), 0.3, true), p[2]) + x};
          }};
}

Module one_weight_three_times() {
  return {{drawn({8, 8})}, [](const Tensors& p, const at::Tensor& x) -> Tensors {
            return {linear(at::tanh(linear(at::tanh(linear(x, p[0])), p[0])), p[0].t())};
          }};
}

// Once by a node that runs in both parts, once by a user's function, and beside the argument.
Module one_weight_in_unlike_nodes() {
  return {{drawn({8})}, [](const Tensors& p, const at::Tensor& x) -> Tensors {
            return {Scale::apply(at::sigmoid(x * p[0]), p[0]) * p[0] + p[0].exp(), x * p[0]};
          }};
}

Module sparse_embedding() {
  return {{drawn({10, 8}), drawn({8, 8})}, [](const Tensors& p, const at::Tensor& x) -> Tensors {
            const auto words = at::tensor({1, 3, 3, 7}, at::kLong);
            return {linear(x + at::embedding(p[0], words, -1, false, /*sparse=*/true), p[1])};
          }};
}

Module in_place() {
  return {{drawn({8, 8}), drawn({8}), drawn({4})}, [](const Tensors& p, const at::Tensor& x) -> Tensors {
            auto y = linear(x, p[0]).add_(p[1]).relu_() + 0.5;
            y.narrow(1, 0, 4).mul_(p[2]);
            return {y * 2};
          }};
}

Module argument_in_place() {
  return {{drawn({8})}, [](const Tensors& p, const at::Tensor& x) -> Tensors { return {x.mul_(p[0]).sin()}; }};
}

Module weight_norm() {
  return {{drawn({8, 8}), drawn({8, 1})}, [](const Tensors& p, const at::Tensor& x) -> Tensors {
            const auto weight = at::_weight_norm(p[0], p[1], 0);
            return {linear(linear(x, weight).tanh(), weight)};
          }};
}

Module convolutions() {
  return {{drawn({6, 2, 3, 3}), drawn({6}), drawn({6}), drawn({6}), drawn({2, 6, 1, 1}), drawn({2}), drawn({2})},
          [](const Tensors& p, const at::Tensor& x) -> Tensors {
            auto y = at::conv2d(x.view({4, 2, 2, 2}), p[0], p[1], 1, 1);
            y = at::relu(at::batch_norm(y, p[2], p[3], {}, {}, true, 0.1, 1e-5, false));
            return {at::group_norm(at::conv2d(y, p[4]), 1, p[5], p[6])};
          }};
}

Module lstm() {
  return {{drawn({32, 8}), drawn({32, 8}), drawn({32}), drawn({32}), drawn({8, 8})},
          [](const Tensors& p, const at::Tensor& x) -> Tensors {
            const auto zeros = at::zeros({1, 2, 8});
            const auto [y, h, c] = at::lstm(linear(x, p[4]).view({2, 2, 8}), {zeros, zeros}, {p[0], p[1], p[2], p[3]},
                                            true, 1, 0.0, true, false, false);
            return {y, h};
          }};
}

Module users_function() {
  return {{drawn({8}), drawn({8, 8})}, [](const Tensors& p, const at::Tensor& x) -> Tensors {
            return {Scale::apply(linear(x, p[1]), p[0]), linear(Scale::apply(x, p[0]).tanh(), p[1])};
          }};
}

Module attention() {
  return {{drawn({8}), drawn({8}), drawn({24, 8}), drawn({8, 8})},
          [](const Tensors& p, const at::Tensor& x) -> Tensors {
            const auto qkv = linear(at::layer_norm(x, {8}, p[0], p[1]), p[2]).view({1, 4, 3, 2, 4}).unbind(2);
            const auto of = [&](int i) { return qkv[i].transpose(1, 2); };
            const auto y = at::scaled_dot_product_attention(of(0), of(1), of(2), {}, 0.0, /*is_causal=*/true);
            return {x + linear(y.transpose(1, 2).reshape({4, 8}), p[3])};
          }};
}

// Results that depend on the argument, on a parameter alone, are a parameter, or the argument itself.
Module unlike_results() {
  return {{drawn({8, 8}), drawn({8})}, [](const Tensors& p, const at::Tensor& x) -> Tensors {
            return {linear(x, p[0]), p[1].exp(), p[1], x, linear(x, p[0].t()).sum()};
          }};
}

Module autocast() {
  return {{drawn({8, 8}), drawn({8, 8})}, [](const Tensors& p, const at::Tensor& x) -> Tensors {
            at::autocast::set_autocast_enabled(at::kCPU, true);
            const auto y = linear(linear(x, p[0]).tanh(), p[1]) + linear(x, p[0]);
            at::autocast::clear_cache();
            at::autocast::set_autocast_enabled(at::kCPU, false);
            return {y};
          }};
}

const std::map<std::string, Module (*)()> kModules{{"ArgumentInPlace", argument_in_place},
                                                   {"Attention", attention},
                                                   {"Autocast", autocast},
                                                   {"Convolutions", convolutions},
                                                   {"InPlace", in_place},
                                                   {"Lstm", lstm},
                                                   {"MlpWithDropout", mlp_with_dropout},
                                                   {"OneWeightInUnlikeNodes", one_weight_in_unlike_nodes},
                                                   {"OneWeightThreeTimes", one_weight_three_times},
                                                   {"SparseEmbedding", sparse_embedding},
                                                   {"UnlikeResults", unlike_results},
                                                   {"UsersFunction", users_function},
                                                   {"WeightNorm", weight_norm}};

// A call of a module, made anew with the same numbers whenever it is asked for.
class Call {
 public:
  enum class Argument : bool { kConstant, kTrained };

  Call(Module (*make)(), Argument argument) {
    at::manual_seed(1);
    module = make();
    for (auto& parameter : module.parameters) parameter.set_requires_grad(true);
    Value arguments = drawn({4, 8}).set_requires_grad(argument == Argument::kTrained);
    graph = std::make_unique<CalleeGraph>(arguments);
    List outputs;
    for (auto& output : module.forward(module.parameters, arguments.as<at::Tensor>())) {
      if (!output.requires_grad()) continue;
      gradients.push_back(at::randn_like(output));
      outputs.items.emplace_back(output);
    }
    graph->set_outputs(outputs);
  }

  InputPart in_parts() { return graph->backward_of_inputs(gradients, {}); }

  Module module;
  Tensors gradients;
  std::unique_ptr<CalleeGraph> graph;
};

::testing::AssertionResult same_bits(const at::Tensor& one, const at::Tensor& other) {
  if (one.defined() != other.defined()) return ::testing::AssertionFailure() << "only one is there";
  if (!one.defined()) return ::testing::AssertionSuccess();
  if (one.layout() != other.layout()) return ::testing::AssertionFailure() << "one of them is sparse";
  const auto dense = [](const at::Tensor& tensor) { return tensor.is_sparse() ? tensor.to_dense() : tensor; };
  if (!at::equal(dense(one), dense(other))) return ::testing::AssertionFailure() << one << " is not " << other;
  return ::testing::AssertionSuccess();
}

void expect_same(const Tensors& ones, const Tensors& others) {
  ASSERT_EQ(ones.size(), others.size());
  for (std::size_t i = 0; i < ones.size(); ++i) EXPECT_TRUE(same_bits(ones[i], others[i])) << i;
}

void expect_same_gradients(const Module& one, const Module& other) {
  for (std::size_t i = 0; i < one.parameters.size(); ++i) {
    EXPECT_TRUE(same_bits(one.parameters[i].grad(), other.parameters[i].grad())) << "parameter " << i;
  }
}

using Parameter = std::pair<std::string, Call::Argument>;
class SplitBackwardOf : public testing::TestWithParam<Parameter> {
 protected:
  Call call() { return {kModules.at(GetParam().first), GetParam().second}; }
};

TEST_P(SplitBackwardOf, HasTheBitsOfTheWholeBackward) {
  auto whole = call(), split = call();
  const auto arguments = whole.graph->backward(whole.gradients, {});
  const auto part = split.in_parts();
  expect_same(part.gradients, arguments);
  for (const auto& parameter : split.module.parameters) EXPECT_FALSE(parameter.grad().defined());
  ASSERT_TRUE(part.rest);
  part.rest();
  expect_same_gradients(split.module, whole.module);
}

TEST_P(SplitBackwardOf, AddsToGradientsThatAreThere) {
  auto whole = call(), split = call();
  for (auto* each : {&whole, &split}) {
    at::manual_seed(2);
    for (auto& parameter : each->module.parameters) parameter.mutable_grad() = at::randn_like(parameter);
  }
  whole.graph->backward(whole.gradients, {});
  split.in_parts().rest();
  expect_same_gradients(split.module, whole.module);
}

std::vector<Parameter> parameters() {
  std::vector<Parameter> all;
  for (const auto& [name, make] : kModules) {
    all.emplace_back(name, Call::Argument::kTrained);
    if (name != "ArgumentInPlace") all.emplace_back(name, Call::Argument::kConstant);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, SplitBackwardOf, testing::ValuesIn(parameters()), [](const auto& info) {
  return info.param.first + (info.param.second == Call::Argument::kConstant ? "OfAConstant" : "");
});

TEST(SplitBackward, RunsAUsersFunctionOnce) {
  Call call(users_function, Call::Argument::kTrained);
  Scale::backwards = 0;
  const auto part = call.in_parts();
  EXPECT_EQ(Scale::backwards, 2);
  part.rest();
  EXPECT_EQ(Scale::backwards, 2);
}

TEST(SplitBackward, TellsEachHookOnceAndRetainsGradients) {
  std::vector<at::Tensor> told;
  at::Tensor retained;
  const auto run = [&](bool split) {
    at::manual_seed(1);
    const auto weight = drawn({8, 8}).set_requires_grad(true), bias = drawn({8}).set_requires_grad(true);
    for (const auto& parameter : {weight, bias}) {
      parameter.register_hook([&](const at::Tensor& gradient) { told.push_back(gradient.clone()); });
    }
    Value arguments = drawn({4, 8}).set_requires_grad(true);
    CalleeGraph graph(arguments);
    retained = at::linear(arguments.as<at::Tensor>(), weight, bias);
    retained.retain_grad();
    const auto hooked = linear(retained.tanh(), weight);
    hooked.register_hook([&](const at::Tensor& gradient) {
      told.push_back(gradient.clone());
      return gradient * 2;
    });
    graph.set_outputs(hooked.sin());
    const auto gradients = Tensors{at::ones({4, 8})};
    if (!split) return graph.backward(gradients, {});
    auto part = graph.backward_of_inputs(gradients, {});
    EXPECT_EQ(told.size(), 1);
    part.rest();
    return part.gradients;
  };
  const auto arguments = run(false);
  const auto whole = std::exchange(told, {});
  const auto kept = retained.grad();
  expect_same(run(true), arguments);
  expect_same(told, whole);
  EXPECT_EQ(told.size(), 3);
  EXPECT_TRUE(same_bits(retained.grad(), kept));
}

TEST(SplitBackward, OfTwoCallsOfOneModuleAccumulatesInTheirOrder) {
  const auto run = [](bool split) {
    at::manual_seed(1);
    const auto weight = drawn({8, 8}).set_requires_grad(true);
    std::vector<WeightPart> rests;
    for (int call = 0; call < 3; ++call) {
      Value arguments = drawn({4, 8}).set_requires_grad(true);
      CalleeGraph graph(arguments);
      graph.set_outputs(linear(linear(arguments.as<at::Tensor>(), weight).tanh(), weight));
      const Tensors gradients{drawn({4, 8})};
      if (split) {
        rests.push_back(graph.backward_of_inputs(gradients, {}).rest);
      } else {
        graph.backward(gradients, {});
      }
    }
    for (const auto& rest : rests) rest();
    return weight.grad();
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

TEST(SplitBackward, IsWholeWhereTheGraphIsKeptOrGradientsAreAskedFor) {
  Call kept(users_function, Call::Argument::kTrained), asked(users_function, Call::Argument::kTrained);
  EXPECT_FALSE(kept.graph->backward_of_inputs(kept.gradients, {.keep_graph = true}).rest);
  EXPECT_TRUE(kept.module.parameters[0].grad().defined());
  EXPECT_FALSE(asked.graph->backward_of_inputs(asked.gradients, {.accumulate = false}).rest);
  EXPECT_FALSE(asked.module.parameters[0].grad().defined());
}

TEST(SplitBackward, WithoutParametersLeavesNothing) {
  Value arguments = drawn({4}).set_requires_grad(true);
  CalleeGraph graph(arguments);
  graph.set_outputs(arguments.as<at::Tensor>().exp());
  EXPECT_FALSE(graph.backward_of_inputs({at::ones({4})}, {}).rest);
}

// The history of a call that a module has kept is as closed as after a whole backward, between the parts and later.
TEST(SplitBackward, RefusesAGradientFromALaterCall) {
  const auto weight = drawn({8}).set_requires_grad(true);
  Value arguments = drawn({4, 8}).set_requires_grad(true);
  CalleeGraph graph(arguments);
  const auto kept = arguments.as<at::Tensor>() + weight;
  graph.set_outputs(kept * 2);
  const auto refuses = [&] {
    EXPECT_THROW(kept.sum().backward({}, /*retain_graph=*/true), base::UsageError);
    Value later = drawn({4, 8}).set_requires_grad(true);
    CalleeGraph of_later(later);
    of_later.set_outputs(later.as<at::Tensor>() * kept);
    EXPECT_THROW(of_later.backward_of_inputs({at::ones({4, 8})}, {}), base::UsageError);
  };
  const auto part = graph.backward_of_inputs({at::ones({4, 8})}, {});
  refuses();
  weight.mutable_grad() = at::Tensor();
  part.rest();
  EXPECT_TRUE(at::equal(weight.grad(), at::full({8}, 8.0)));
  refuses();
}

TEST(SplitBackward, CallsOtherRanksInTheInputPartAsInAWholeBackward) {
  const auto weight = drawn({8}).set_requires_grad(true), before = drawn({8}).set_requires_grad(true);
  int calls = 0;
  const auto run = [&](const Tensors& gradients, const BackwardOptions& options, const GradientTargets& targets) {
    ++calls;
    EXPECT_TRUE(options.accumulate);
    EXPECT_FALSE(options.keep_graph);
    EXPECT_EQ(targets.at(0).kind, GradientTarget::Kind::kHere);
    return Tensors{gradients[0] * 3};
  };
  const Value arguments = before * 5;
  CallerGraph caller(arguments, "block", base::Rank(1), run);
  Value outputs = at::ones({8}).set_requires_grad(true);
  caller.attach(outputs, "1");
  const auto rest = run_input_part({(outputs.as<at::Tensor>() * weight).sum()}, {}, 0.5);
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_FALSE(before.grad().defined());
  rest();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE(at::equal(weight.grad(), at::full({8}, 0.5)));
  EXPECT_TRUE(at::allclose(before.grad(), weight.detach() * 7.5));
}

TEST(SplitBackward, ThrowsWhatAWeightThrows) {
  const auto weight = drawn({8}).set_requires_grad(true);
  weight.register_hook([](const at::Tensor&) { throw base::Error("it"); });
  Value arguments = drawn({8}).set_requires_grad(true);
  CalleeGraph graph(arguments);
  graph.set_outputs(arguments.as<at::Tensor>() * weight);
  const auto part = graph.backward_of_inputs({at::ones({8})}, {});
  EXPECT_THROW(part.rest(), base::Error);
}

// Counts the bytes of this thread's tensors.
class Counted : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, std::int64_t bytes, std::size_t, std::size_t, c10::Device) override { now += bytes; }
  bool memoryProfilingEnabled() const override { return true; }
  std::int64_t now = 0;
};

class Counting {
 public:
  std::int64_t bytes() const { return counted_->now; }

 private:
  std::shared_ptr<Counted> counted_ = std::make_shared<Counted>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, counted_};
};

// A block of a transformer, 64 wide, on 2 sequences of 32.
struct Block {
  Block() {
    const std::vector<std::vector<std::int64_t>> shapes{{64}, {64}, {192, 64}, {64, 64},
                                                        {64}, {64}, {256, 64}, {64, 256}};
    for (const auto& shape : shapes) p.push_back(drawn(shape, 0.1).set_requires_grad(true));
  }
  at::Tensor forward(at::Tensor x) const {
    const auto qkv = linear(at::layer_norm(x, {64}, p[0], p[1]), p[2]).view({2, 32, 3, 4, 16}).unbind(2);
    const auto of = [&](int i) { return qkv[i].transpose(1, 2); };
    const auto y = at::scaled_dot_product_attention(of(0), of(1), of(2), {}, 0.0, /*is_causal=*/true);
    x = x + linear(y.transpose(1, 2).reshape({2, 32, 64}), p[3]);
    return x + linear(at::gelu(linear(at::layer_norm(x, {64}, p[4], p[5]), p[6])), p[7]);
  }
  Tensors p;
};

TEST(SplitBackward, KeepsBetweenThePartsAtMost13TenthsOfTheActivations) {
  const Block block;
  const Counting counting;
  const auto run = [&] {
    const auto before = counting.bytes();
    Value arguments = at::ones({2, 32, 64}).set_requires_grad(true);
    auto graph = std::make_unique<CalleeGraph>(arguments);
    graph->set_outputs(block.forward(std::exchange(arguments, {}).as<at::Tensor>()));
    const auto activations = counting.bytes() - before;
    auto part = graph->backward_of_inputs({at::ones({2, 32, 64})}, {});
    graph.reset();
    part.gradients.clear();
    const auto kept = counting.bytes() - before;
    EXPECT_GT(activations, 0);
    EXPECT_LE(static_cast<double>(kept), 1.3 * static_cast<double>(activations));
    part.rest();
  };
  run();
  const auto after_one = counting.bytes();  // with the gradients
  for (int step = 1; step < 1000; ++step) run();
  EXPECT_EQ(counting.bytes(), after_one);
}

}  // namespace
}  // namespace lamina::remote
