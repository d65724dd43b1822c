// SPDX-License-Identifier: Apache-2.0
// No device but the CPU is needed for the update that others get. Tensors of the CPU go through it, and so do those of
// the meta device, which have no memory: so nothing looks at an element.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <algorithm>

#include "lamina/optim/registry.h"
#include "tests/fused/references.h"
#include "tests/optim/steps.h"
#include "tests/usage_error.h"

// Torch has these of the meta device in Python alone.
TORCH_LIBRARY_IMPL(aten, Meta, library) {
  library.impl("where.self", [](const at::Tensor& condition, const at::Tensor& a, const at::Tensor&) {
    return at::empty(condition.sizes(), a.options());
  });
  library.impl("abs.out",
               [](const at::Tensor& from, at::Tensor& out) -> at::Tensor& { return out.resize_(from.sizes()), out; });
}

namespace lamina::optim {
namespace {

using fused::Sample;
using Params = std::vector<at::Tensor>;

Optimizer make(const Sample& sample, Way way) {
  return Optimizer(sample.rule->declaration.name, GivenHyper(sample.given.begin(), sample.given.end()), way);
}

// Training of parameters of several shapes; one of them has no gradient in the first step, so that counts differ.
struct Training {
  const Sample& sample;
  Way way;
  at::ScalarType dtype, gradient_dtype;
  double scale = 1;
  Params parameters = {}, copies = {};
  std::vector<State> states = {};

  Training& run(int steps) {
    at::manual_seed(5);
    auto optimizer = make(sample, way);
    for (const auto& shape : std::vector<std::vector<std::int64_t>>{{}, {0, 3}, {7}, {33, 65}, {2, 3, 5}}) {
      parameters.push_back(at::randn(shape, at::kDouble).to(dtype));
      copies.push_back(parameters.back().to(at::kBFloat16));
    }
    states.resize(parameters.size());
    for (int i = 0; i < steps; ++i) {
      std::vector<Update> updates;
      std::vector<at::Tensor> gradients(parameters.size());
      for (std::size_t k = 0; k < parameters.size(); ++k) {
        auto& gradient = gradients[k] = at::randn(parameters[k].sizes(), at::kDouble).to(gradient_dtype);
        if (k == 2 && i == 0) gradient.reset();
        updates.push_back({.parameter = &parameters[k], .gradient = &gradient, .state = &states[k], .copy = copies[k]});
      }
      const Step step{.hyper = optimizer.hyper, .gradient_scale = scale, .gradient_norm = 3};
      optimizer.functional->measure(step, updates, optimizer.threads);
      optimizer.functional->update(step, updates, optimizer.threads);
    }
    return *this;
  }
};

class WholeTensors : public ::testing::TestWithParam<std::tuple<Sample, Way>> {
 protected:
  const Sample& sample() const { return std::get<0>(GetParam()); }
  Way way() const { return std::get<1>(GetParam()); }

  void expect_the_loops_values(at::ScalarType dtype, at::ScalarType gradient_dtype, double scale, double tolerance) {
    const auto expected = Training{sample(), Way::kByDevice, dtype, gradient_dtype, scale}.run(20);
    const auto found = Training{sample(), way(), dtype, gradient_dtype, scale}.run(20);
    const auto near = [&](const at::Tensor& a, const at::Tensor& b) {
      ASSERT_EQ(a.scalar_type(), b.scalar_type());
      EXPECT_TRUE(at::allclose(a, b, tolerance, tolerance)) << a.sub(b).abs().max();
    };
    for (std::size_t k = 0; k < expected.parameters.size(); ++k) {
      near(found.parameters[k], expected.parameters[k]);
      EXPECT_TRUE(at::equal(found.copies[k], found.parameters[k].to(at::kBFloat16)));
      const auto &state = found.states[k], &other = expected.states[k];
      ASSERT_EQ(state.tensors.size(), other.tensors.size());
      for (std::size_t i = 0; i < state.tensors.size(); ++i) {
        ASSERT_EQ(state.tensors[i].defined(), other.tensors[i].defined());
        if (other.tensors[i].defined()) near(state.tensors[i], other.tensors[i]);
      }
      EXPECT_THAT(state.numbers, testing::Pointwise(testing::DoubleNear(tolerance), other.numbers));
    }
  }
};

TEST_P(WholeTensors, GiveTheLoopsValuesInDouble) { expect_the_loops_values(at::kDouble, at::kDouble, 1, 1e-12); }

TEST_P(WholeTensors, GiveTheLoopsValuesInFloat) { expect_the_loops_values(at::kFloat, at::kFloat, 1, 2e-5); }

TEST_P(WholeTensors, GiveTheLoopsValuesToMastersOfHalfPrecision) {
  expect_the_loops_values(at::kFloat, at::kBFloat16, 0.125, 2e-5);
}

// A rounding that falls the other way is one in 2^8, and Rprop's steps have the sign of a gradient.
TEST_P(WholeTensors, GiveTheLoopsValuesInHalfPrecision) {
  expect_the_loops_values(at::kBFloat16, at::kBFloat16, 1, 0.06);
}

// Tensors without memory.
TEST_P(WholeTensors, NeverLookAtAnElement) {
  auto optimizer = make(sample(), way());
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf}) {
    const auto meta = at::TensorOptions(at::kMeta).dtype(dtype);
    const auto parameter = at::empty({4, 5}, meta).t(), copy = at::empty({5, 4}, meta.dtype(at::kHalf));
    const auto gradient = at::empty({5, 4}, meta.dtype(at::kHalf));
    State state;
    for (int i = 0; i < 2; ++i) {
      std::vector<Update> updates{
          {.parameter = &parameter, .gradient = &gradient, .state = &state, .copy = copy, .norms = {2, 3}}};
      optimizer.functional->update({optimizer.hyper, 0.5, 2}, updates, optimizer.threads);
    }
    const bool uses_tensors = std::ranges::any_of(state.tensors, [](const auto& tensor) { return tensor.defined(); });
    EXPECT_EQ(state.started, uses_tensors || !state.numbers.empty());  // SGD without momentum has nothing
    for (const auto& tensor : state.tensors) EXPECT_TRUE(!tensor.defined() || tensor.is_meta());
  }
}

INSTANTIATE_TEST_SUITE_P(All, WholeTensors,
                         ::testing::Combine(::testing::ValuesIn(fused::samples()),
                                            ::testing::Values(Way::kWholeTensors, Way::kWholeTensorsByTheRule)),
                         [](const auto& info) {
                           const auto& sample = std::get<0>(info.param);
                           return sample.rule->declaration.name + sample.label + name_of(std::get<1>(info.param));
                         });

// Counts the operations that an update calls, by name.
std::map<std::string, int> operations_in(const std::function<void()>& work) {
  static thread_local std::map<std::string, int>* found;
  std::map<std::string, int> counts;
  found = &counts;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        ++(*found)[function.name()];
        return nullptr;
      }).scopes({at::RecordScope::FUNCTION}));
  work();
  at::removeCallback(handle);
  return counts;
}

// Two steps of a hundred parameters.
std::map<std::string, int> operations_of(const std::string& name, Way way) {
  Optimizer optimizer(name, {{"lr", 0.1}}, way);
  Params parameters, gradients;
  for (int i = 0; i < 100; ++i) {
    parameters.push_back(at::ones({5}));
    gradients.push_back(at::full({5}, 0.5));
  }
  std::vector<State> states(parameters.size());
  const auto step = [&] {
    std::vector<Update> updates;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      updates.push_back({.parameter = &parameters[i], .gradient = &gradients[i], .state = &states[i]});
    }
    const Step given{.hyper = optimizer.hyper, .gradient_norm = 1};
    optimizer.functional->measure(given, updates, optimizer.threads);
    optimizer.functional->update(given, updates, optimizer.threads);
  };
  step();
  return operations_in(step);
}

TEST(WholeTensorsOfAList, WaitForTheDeviceOnceForAllNorms) {
  for (const char* name : {"LAMB", "NovoGrad", "AdamW"}) {
    auto counts = operations_of(name, Way::kWholeTensorsByTheRule);
    EXPECT_EQ(counts["aten::item"] + counts["aten::_local_scalar_dense"] + counts["aten::nonzero"], 0);
    EXPECT_EQ(counts["aten::stack"], std::string(name) == "AdamW" ? 0 : 1);
  }
}

TEST(WholeTensorsOfAList, AreUpdatedTogether) {
  auto own = operations_of("LAMB", Way::kWholeTensorsByTheRule);
  EXPECT_EQ(own["aten::_foreach_sqrt_"], 2);  // in both passes
  auto torchs = operations_of("AdamW", Way::kWholeTensors);
  EXPECT_EQ(torchs["aten::_fused_adamw_"], 1);
}

// More elements than are updated at once, with a norm that is of all of them.
TEST(WholeTensorsOfAList, MayBeLarge) {
  const auto value = at::full({(1 << 24) + 5}, 0.5), gradient = at::full_like(value, 0.25);
  Params trained;
  for (const auto way : {Way::kByDevice, Way::kWholeTensors}) {
    Optimizer optimizer("LAMB", {}, way);
    trained.push_back(value.clone());
    optimizer.step({trained.back()}, {gradient});
  }
  EXPECT_TRUE(at::allclose(trained[0], trained[1]));
  EXPECT_TRUE(trained[1].eq(trained[1][0]).all().item<bool>());
}

TEST(WholeTensorsOfAList, LeaveGradientsAsTheyAre) {
  for (const auto& sample : fused::samples()) {
    for (const auto way : kWays) {
      auto optimizer = make(sample, way);
      const auto gradient = at::full({3}, 5.0);
      optimizer.step({at::ones({3})}, {gradient});
      EXPECT_TRUE(gradient.eq(5).all().item<bool>()) << sample.rule->declaration.name << sample.label << name_of(way);
    }
  }
}

TEST(WholeTensorsOfAList, OfASharedLibraryAreRefusedOnOtherDevicesBeforeAnythingChanges) {
  Registry registry;
  const auto functional = registry.find(registry.load(TRUST_PLUGIN));
  const auto hyper = fused::hyper_values(functional->declaration(), GivenHyper{{"lr", 0.5}});
  const auto here = at::ones({2}), there = at::empty({2}, at::kMeta);
  Threads threads(1);
  std::vector<State> states(2);
  EXPECT_EQ(
      usage_error_of([&] { step(*functional, hyper, {{here, there}}, {{here.clone(), there}}, states, threads); }),
      "the optimizer Trust is a shared library's, which updates parameters on the CPU alone; one is on meta");
  EXPECT_TRUE(here.eq(1).all().item<bool>());
}

}  // namespace
}  // namespace lamina::optim
