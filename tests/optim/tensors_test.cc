// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "lamina/optim/registry.h"
#include "tests/optim/steps.h"
#include "tests/usage_error.h"

namespace lamina::optim {
namespace {

using testing::HasSubstr;

const std::vector<std::string> kAll{"SGD",    "Adam",  "AdamW", "Adagrad", "Adadelta", "RMSprop", "Rprop",
                                    "Adamax", "NAdam", "RAdam", "LAMB",    "NovoGrad", "QHM"};

using Kind = std::tuple<std::string, Way>;

Optimizer make(const Kind& kind) {
  const auto& [name, way] = kind;
  if (name == "SGD") return Optimizer(name, {{"lr", 0.1}, {"momentum", 0.9}}, way);
  if (name == "QHM") return Optimizer(name, {{"lr", 0.1}, {"momentum", 0.9}, {"nu", 0.7}}, way);
  return Optimizer(name, {{"lr", 0.1}}, way);
}

// Three steps of a parameter with gradients that `as` puts into memory in some way.
at::Tensor trained(const Kind& kind, at::Tensor parameter, const std::function<at::Tensor(const at::Tensor&)>& as) {
  at::manual_seed(3);
  auto optimizer = make(kind);
  for (int i = 0; i < 3; ++i) {
    const auto drawn = parameter.scalar_type() == at::kHalf ? at::kFloat : parameter.scalar_type();
    const auto gradient = at::randn(parameter.sizes(), drawn).to(parameter.scalar_type());
    optimizer.step({parameter}, {as(gradient)});
  }
  return parameter;
}

at::Tensor as_it_is(const at::Tensor& tensor) { return tensor.clone(); }

class Tensors : public ::testing::TestWithParam<Kind> {};

// The order of elements in memory changes sums of squares alone, in their last bits.
void expect_same(const at::Tensor& a, const at::Tensor& b) { EXPECT_TRUE(at::allclose(a, b, 1e-6, 1e-7)); }

TEST_P(Tensors, AreUpdatedHoweverTheyLie) {
  const auto value = at::randn({6, 10});
  const auto expected = trained(GetParam(), value.clone(), as_it_is);
  expect_same(trained(GetParam(), value.t().contiguous().t(), as_it_is), expected);
  expect_same(trained(GetParam(), value.clone(), [](const auto& g) { return g.t().contiguous().t(); }), expected);
  const auto wide = at::full({6, 20}, 7.0);
  const auto strided = wide.slice(1, 0, 20, 2);
  strided.copy_(value);
  expect_same(trained(GetParam(), strided, as_it_is), expected);
  EXPECT_TRUE(wide.slice(1, 1, 20, 2).eq(7).all().item<bool>());
  const auto one = at::randn({1}).expand({6, 10});
  const auto expanded = [&](const auto&) { return one; };
  expect_same(trained(GetParam(), value.clone(), expanded),
              trained(GetParam(), value.clone(), [&](const auto&) { return one.contiguous(); }));
}

TEST_P(Tensors, OfComplexNumbersArePairsOfReals) {
  const auto value = at::randn({5, 3}, at::kComplexDouble);
  const auto complex = trained(GetParam(), value.clone(), as_it_is);
  at::manual_seed(3);
  auto optimizer = make(GetParam());
  const auto reals = at::view_as_real(value).clone();
  for (int i = 0; i < 3; ++i) optimizer.step({reals}, {at::view_as_real(at::randn({5, 3}, at::kComplexDouble))});
  EXPECT_TRUE(at::equal(at::view_as_real(complex), reals));
  expect_same(
      at::view_as_real(trained(GetParam(), value.clone(), [](const auto& g) { return g.conj().clone().conj(); })),
      reals);
}

TEST_P(Tensors, MayBeEmptyOrScalars) {
  EXPECT_EQ(trained(GetParam(), at::zeros({0, 4}), as_it_is).numel(), 0);
  const auto scalar = at::full({}, 0.5);
  const auto row = at::full({1}, 0.5);
  EXPECT_EQ(trained(GetParam(), scalar, as_it_is).item<float>(), trained(GetParam(), row, as_it_is).item<float>());
}

TEST_P(Tensors, WithoutAGradientAreLeftAlone) {
  auto optimizer = make(GetParam());
  const auto skipped = at::ones({3}), updated = at::ones({3});
  optimizer.step({skipped, updated}, {at::Tensor(), at::ones({3})});
  EXPECT_TRUE(skipped.eq(1).all().item<bool>());
  EXPECT_FALSE(updated.eq(1).any().item<bool>());
  EXPECT_FALSE(optimizer.states[0].started);
  EXPECT_TRUE(optimizer.states[0].tensors.empty());
  // Its first step is a first step.
  auto fresh = make(GetParam());
  const auto other = at::ones({3});
  fresh.step({other}, {at::ones({3})});
  optimizer.step({skipped, updated}, {at::ones({3}), at::Tensor()});
  expect_same(skipped, other);
}

// The numbers are of about 1, and are rounded to 11 bits in each of three steps.
TEST_P(Tensors, OfHalfPrecisionAreUpdatedToTheirPrecision) {
  const auto value = at::randn({40}, at::kHalf);
  const auto expected = trained(GetParam(), value.to(at::kFloat), as_it_is);
  const auto half = trained(GetParam(), value.clone(), as_it_is);
  EXPECT_EQ(half.scalar_type(), at::kHalf);
  EXPECT_FALSE(at::equal(half, value));
  EXPECT_TRUE(at::allclose(half.to(at::kFloat), expected, 1e-2, 1e-2)) << half << expected;
}

TEST_P(Tensors, TellAutogradThatTheyHaveChanged) {
  auto optimizer = make(GetParam());
  const auto parameter = at::ones({3}).requires_grad_();
  const auto version = parameter._version();
  optimizer.step({parameter}, {at::ones({3})});
  EXPECT_GT(parameter._version(), version);
  EXPECT_TRUE(parameter.requires_grad());
  for (const auto& state : optimizer.states[0].tensors) {
    if (!state.defined()) continue;
    const auto before = state._version();
    optimizer.step({parameter}, {at::ones({3})});
    EXPECT_GT(state._version(), before);
  }
}

TEST_P(Tensors, WithMastersGetTheirValuesInTheSamePass) {
  auto optimizer = make(GetParam());
  const auto master = at::randn({5, 7});
  const auto model = master.to(at::kBFloat16).t().contiguous().t();
  State state;
  const auto gradient = at::randn({5, 7}, at::kBFloat16);
  std::vector<Update> updates{{.parameter = &master, .gradient = &gradient, .state = &state, .copy = model}};
  const Step step{.hyper = optimizer.hyper, .gradient_scale = 0.5, .gradient_norm = 1};
  optimizer.functional->measure(step, updates, optimizer.threads);
  optimizer.functional->update(step, updates, optimizer.threads);
  EXPECT_TRUE(at::equal(model, master.to(at::kBFloat16)));
}

TEST_P(Tensors, ThatDoNotFitAreErrorsBeforeAnythingIsChanged) {
  auto optimizer = make(GetParam());
  const auto first = at::ones({3});
  const auto problem = [&](const at::Tensor& parameter, const at::Tensor& gradient) {
    const auto words = usage_error_of([&] { optimizer.step({first, parameter}, {at::ones({3}), gradient}); });
    EXPECT_TRUE(first.eq(1).all().item<bool>());
    for (const State& state : optimizer.states) EXPECT_TRUE(state.tensors.empty());
    return words;
  };
  EXPECT_EQ(problem(at::ones({2}), at::ones({2}).to_sparse()),
            std::get<0>(GetParam()) + " does not support sparse gradients, please consider SparseAdam instead");
  EXPECT_THAT(problem(at::ones({2}), at::ones({3})),
              HasSubstr("a gradient of shape [3] and type Float for a parameter"));
  EXPECT_THAT(problem(at::ones({2}, at::kLong), at::ones({2})), HasSubstr("a parameter is of type Long"));
  EXPECT_THAT(problem(at::ones({2}), at::ones({2}, at::kMeta)), HasSubstr("on meta for a parameter on cpu"));
  EXPECT_EQ(
      usage_error_of([&] { optimizer.step({first, first}, {first}); }),
      "the gradients passed in does not equal to the size of the parameters! Params length: 2. Gradients length: 1");
}

// Two holders of five and four elements each, padded to six with what must not be looked at.
TEST_P(Tensors, InPartsThatAreMeasuredAndCombinedAreTheWhole) {
  auto whole = make(GetParam());
  const auto& combines = whole.functional->declaration().norms;
  const auto value = at::randn({9});
  const auto parameter = value.clone();
  std::vector<at::Tensor> parts;
  std::vector<State> states(2);
  const std::vector<std::int64_t> sizes{5, 4};
  const auto cut = [&](const at::Tensor& tensor) {
    std::vector<at::Tensor> found;
    for (const auto& part : tensor.split_with_sizes(sizes)) {
      found.push_back(at::cat({part, at::full({6 - part.numel()}, NAN)}));
    }
    return found;
  };
  parts = cut(value);
  for (int i = 0; i < 3; ++i) {
    const auto gradient = at::randn({9});
    whole.step({parameter}, {gradient});
    const auto gradients = cut(gradient);
    std::vector<Update> updates;
    for (std::size_t k = 0; k < 2; ++k) {
      updates.push_back({.parameter = &parts[k], .gradient = &gradients[k], .state = &states[k], .elements = sizes[k]});
    }
    const Step step{.hyper = whole.hyper, .gradient_norm = std::sqrt(squared_gradient_norm(updates, 1, whole.threads))};
    for (auto& update : updates) whole.functional->measure(step, {&update, 1}, whole.threads);
    Norms all{};
    for (std::size_t k = 0; k < combines.size(); ++k) {
      all[k] = fused::combined(combines[k], updates[0].norms[k], updates[1].norms[k]);
    }
    for (auto& update : updates) {
      update.norms = all;
      whole.functional->update(step, {&update, 1}, whole.threads);
    }
  }
  expect_same(at::cat({parts[0].narrow(0, 0, 5), parts[1].narrow(0, 0, 4)}), parameter);
  EXPECT_TRUE(at::cat({parts[0].narrow(0, 5, 1), parts[1].narrow(0, 4, 2)}).isnan().all().item<bool>());
}

TEST_P(Tensors, WhoseElementsAreOneInMemoryAreRefusedBeforeAnythingChanges) {
  auto optimizer = make(GetParam());
  const auto plain = at::ones({3}), expanded = at::ones({1}).expand({3});
  EXPECT_THAT(usage_error_of([&] { optimizer.step({plain, expanded}, {at::ones({3}), at::ones({3})}); }),
              HasSubstr("more than one element of a parameter of shape [3]"));
  EXPECT_TRUE(plain.eq(1).all().item<bool>());
}

TEST_P(Tensors, WhoseMemoryWasGivenBackAreRefusedBeforeAnythingChanges) {
  auto optimizer = make(GetParam());
  const auto plain = at::ones({3}), emptied = at::ones({3});
  const auto problem = [&](const at::Tensor& gradient) {
    return usage_error_of([&] { optimizer.step({plain, emptied}, {at::ones({3}), gradient}); });
  };
  EXPECT_EQ(problem(at::ones({3})), "");
  const auto before = plain.clone();
  const auto freed = at::ones({3});
  freed.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, at::kCPU));
  EXPECT_THAT(problem(freed), HasSubstr("a gradient of shape [3] has no memory"));
  emptied.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, at::kCPU));
  EXPECT_THAT(problem(at::ones({3})), HasSubstr("a parameter of shape [3] has no memory"));
  EXPECT_TRUE(at::equal(plain, before));
}

// In a list most tensors are like those of the parameter before, and are only looked at; one alone is checked in full.
TEST_P(Tensors, MayChangeInAnyWayBetweenSteps) {
  const auto shapes = std::vector<std::vector<std::int64_t>>{{4, 6}, {4, 6}, {0, 2}, {4, 6}, {}, {24}};
  const auto drawn = [&] {
    at::manual_seed(7);
    std::vector<at::Tensor> all;
    for (const auto& shape : shapes) all.push_back(at::randn(shape));
    return all;
  };
  const auto listed = drawn(), single = drawn();
  auto together = make(GetParam());
  together.states.resize(shapes.size());
  std::vector<std::unique_ptr<Optimizer>> alone;
  for (std::size_t i = 0; i < shapes.size(); ++i) alone.emplace_back(new Optimizer(make(GetParam())));

  using Change = std::function<void(at::Tensor parameter, at::Tensor & gradient, State&)>;
  const auto transposed = [](const at::Tensor& tensor) { return tensor.t().clone().t(); };
  const std::vector<Change> changes{
      [](at::Tensor, at::Tensor&, State&) {},
      [](at::Tensor, at::Tensor& gradient, State&) { gradient = gradient.to(at::kDouble); },
      [](at::Tensor, at::Tensor& gradient, State&) { gradient = gradient.to(at::kHalf); },
      [&](at::Tensor, at::Tensor& gradient, State&) { gradient = transposed(gradient); },
      [](at::Tensor, at::Tensor& gradient, State&) { gradient = at::cat({gradient, gradient}, -1).slice(1, 0, 12, 2); },
      [](at::Tensor, at::Tensor& gradient, State&) { gradient = gradient._neg_view(); },
      [&](at::Tensor parameter, at::Tensor&, State&) { parameter.set_data(transposed(parameter)); },
      [](at::Tensor parameter, at::Tensor&, State&) {
        parameter.set_data(at::cat({parameter, parameter}).slice(0, 1, 5));
      },
      [](at::Tensor parameter, at::Tensor&, State&) { parameter.set_data(parameter.clone()); },
      [&](at::Tensor, at::Tensor&, State& state) {
        for (auto& tensor : state.tensors) tensor = tensor.defined() ? transposed(tensor) : tensor;
      },
      [](at::Tensor, at::Tensor&, State& state) {
        for (auto& tensor : state.tensors) tensor = tensor.defined() ? tensor.to(at::kDouble) : tensor;
      },
      [](at::Tensor, at::Tensor&, State& state) {
        if (!state.tensors.empty()) state.tensors.front().reset();
      },
      [](at::Tensor, at::Tensor&, State& state) { state = {}; },
      [](at::Tensor, at::Tensor& gradient, State&) { gradient.reset(); },
  };
  for (std::size_t k = 0; k < changes.size(); ++k) {
    auto gradients = drawn(), same = drawn();
    changes[k](listed[3], gradients[3], together.states[3]);
    if (k > 0) changes[k](single[3], same[3], alone[3]->states[0]);
    together.step(listed, gradients);
    for (std::size_t i = 0; i < shapes.size(); ++i) alone[i]->step({single[i]}, {same[i]});
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      if (std::get<0>(GetParam()) != "LAMB") {  // which divides gradients by the norm of all
        EXPECT_TRUE(at::equal(listed[i], single[i])) << "parameter " << i << " after change " << k;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Tensors, ::testing::Combine(::testing::ValuesIn(kAll), ::testing::ValuesIn(kWays)),
                         [](const auto& info) { return std::get<0>(info.param) + name_of(std::get<1>(info.param)); });

TEST(Step, BadHyperparametersAreErrors) {
  Optimizer optimizer("AdamW", {{"lr", -1.0}});
  EXPECT_EQ(usage_error_of([&] { optimizer.step({at::ones({2})}, {at::ones({2})}); }), "Invalid learning rate: -1");
}

TEST(Step, MakesTheStatesThatAreUsed) {
  Optimizer optimizer("RMSprop", {{"centered", 1}});
  optimizer.step({at::ones({2})}, {at::ones({2})});
  const auto& tensors = optimizer.states[0].tensors;  // square_avg, momentum_buffer, grad_avg
  EXPECT_TRUE(tensors.at(0).defined());
  EXPECT_FALSE(tensors.at(1).defined());
  EXPECT_TRUE(at::allclose(tensors.at(2), at::full({2}, 0.01)));
  EXPECT_EQ(optimizer.states[0].numbers, std::vector<double>{1});
}

TEST(Step, MakesStatesThatAreTensorsOfTheirOwn) {
  const std::vector parameters{at::ones({3}),
                               at::ones({5, 2}).t(),
                               at::ones({}),
                               at::ones({0, 4}),
                               at::ones({4}, at::kComplexDouble),
                               at::ones({100}, at::kHalf),
                               at::ones({1000, 1000})};
  Optimizer optimizer("Adam", {{"amsgrad", 1}});
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) gradients.push_back(at::ones_like(parameter));
  optimizer.step(parameters, gradients);
  std::vector<std::pair<const std::byte*, const std::byte*>> spans;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    ASSERT_EQ(optimizer.states[i].tensors.size(), 3);
    for (const auto& tensor : optimizer.states[i].tensors) {
      EXPECT_EQ(tensor.strides(), parameters[i].strides());
      EXPECT_EQ(tensor.scalar_type(), parameters[i].scalar_type());
      EXPECT_EQ(tensor.storage().nbytes(), tensor.nbytes());
      EXPECT_TRUE(tensor.storage().resizable());
      const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
      spans.emplace_back(begin, begin + tensor.nbytes());
    }
  }
  std::ranges::sort(spans);
  for (std::size_t i = 1; i < spans.size(); ++i) EXPECT_LE(spans[i - 1].second, spans[i].first);

  // One may outlive the others.
  const auto kept = optimizer.states[0].tensors[0];
  optimizer.states.clear();
  EXPECT_TRUE(at::allclose(kept, at::full({3}, 0.1)));
}

TEST(Step, MakesTheStatesOfParametersThatComeLater) {
  Optimizer optimizer("SGD", {{"momentum", 0.9}});
  std::vector<at::Tensor> parameters, gradients;
  for (int i = 1; i <= 4; ++i) {
    parameters.push_back(at::zeros({i}));
    gradients.push_back(at::ones({i}));
    optimizer.step(parameters, gradients);
  }
  const std::vector momenta{3.439F, 2.71F, 1.9F, 1.0F};
  for (std::size_t i = 0; i < 4; ++i) {
    const auto& momentum = optimizer.states[i].tensors.at(0);
    EXPECT_TRUE(at::allclose(momentum, at::full_like(momentum, momenta[i]))) << momentum;
  }
}

TEST(Step, IsTheFirstInBothPasses) {
  Optimizer optimizer("NovoGrad");
  optimizer.step({at::ones({2})}, {at::tensor({3.0F, 4.0F})});
  EXPECT_EQ(optimizer.states[0].numbers, (std::vector<double>{1, 5}));  // the norm itself, not its average with zero
}

TEST(Step, ServesManyThreadsWithParametersOfTheirOwn) {
  const auto functional = Registry().find("LAMB");
  const auto hyper = fused::hyper_values(functional->declaration(), GivenHyper{});
  Threads shared(3);
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 4; ++i) parameters.push_back(at::ones({5000}));
  std::vector<std::thread> trainers;
  for (const auto& parameter : parameters) {
    trainers.emplace_back([&functional, &hyper, &shared, parameter] {
      std::vector<State> states(1);
      for (int i = 0; i < 20; ++i) step(*functional, hyper, {{parameter}}, {{at::full({5000}, 0.5)}}, states, shared);
    });
  }
  for (auto& trainer : trainers) trainer.join();
  for (const auto& parameter : parameters) EXPECT_TRUE(at::equal(parameter, parameters[0]));
  EXPECT_FALSE(parameters[0].eq(1).any().item<bool>());
}

TEST(Step, ClipsTheGradientOfLambByTheNormOfAll) {
  const auto parameters = std::vector{at::ones({2}), at::ones({3})};
  const auto gradients = std::vector{at::full({2}, 30.0), at::full({3}, -40.0)};
  std::vector<at::Tensor> scaled, others;
  const double norm = std::sqrt(2 * 900.0 + 3 * 1600.0);
  for (const auto& gradient : gradients) scaled.push_back(gradient / norm);
  for (const auto& parameter : parameters) others.push_back(parameter.clone());
  Optimizer clipping("LAMB", {{"eps", 0.1}}), unclipped("LAMB", {{"eps", 0.1}, {"max_grad_norm", 0}});
  clipping.step(parameters, gradients);
  unclipped.step(others, scaled);
  for (std::size_t i = 0; i < 2; ++i) expect_same(parameters[i], others[i]);
}

}  // namespace
}  // namespace lamina::optim
