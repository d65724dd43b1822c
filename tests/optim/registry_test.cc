// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/registry.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/fused/rules.h"
#include "lamina/optim/fused_functional.h"
#include "tests/optim/steps.h"
#include "tests/usage_error.h"

namespace lamina::optim {
namespace {

using testing::HasSubstr;

TEST(Registry, HasOurOwnByName) {
  const Registry registry;
  for (const char* name : {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "Rprop", "Adamax", "NAdam",
                           "RAdam", "LAMB", "NovoGrad", "QHM"}) {
    ASSERT_NE(registry.find(name), nullptr) << name;
    EXPECT_STREQ(registry.find(name)->declaration().name, name);
  }
  EXPECT_EQ(registry.find("ASGD"), nullptr);
}

TEST(Registry, TheProgramsEntryWins) {
  Registry registry;
  const auto before = registry.find("SGD");
  const auto own = std::make_shared<FusedFunctional>(fused::kQhm);
  registry.add("SGD", own);
  EXPECT_EQ(registry.find("SGD"), own);
  EXPECT_STREQ(before->declaration().name, "SGD");  // who has found it keeps it
}

TEST(Registry, LoadsAnOptimizerFromASharedLibrary) {
  auto registry = std::make_unique<Registry>();
  EXPECT_EQ(registry->load(TRUST_PLUGIN), "Trust");
  const auto functional = registry->find("Trust");
  registry.reset();
  EXPECT_EQ(functional->declaration().needs, fused::Needs::kNorms);
  const auto hyper = fused::hyper_values(functional->declaration(), GivenHyper{{"lr", 0.5}});
  Threads threads(2);
  const std::vector<at::Tensor> parameters{at::full({100, 60}, 3.0), at::full({7}, 3.0, at::kBFloat16),
                                           at::full({2}, 3.0, at::kDouble)};
  std::vector<State> states(parameters.size());
  for (int i = 0; i < 2; ++i) {  // steps of half the norm, against a gradient of any length
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : parameters) gradients.push_back(at::full_like(parameter, 0.25 * (i + 1)));
    step(*functional, hyper, parameters, gradients, states, threads);
  }
  for (const auto& parameter : parameters) EXPECT_TRUE(at::allclose(parameter, at::full_like(parameter, 0.75)));
  EXPECT_EQ(states[0].numbers, std::vector<double>{2});
  EXPECT_TRUE(at::allclose(states[0].tensors[0], at::full({100, 60}, 0.75)));
  EXPECT_EQ(usage_error_of([&] { functional->check(std::vector<double>{-1}); }), "Trust goes forward");
}

TEST(Registry, ALibrarysGradientsAreScaledForIt) {
  Registry registry;
  const auto functional = registry.find(registry.load(TRUST_PLUGIN));
  const auto hyper = fused::hyper_values(functional->declaration(), GivenHyper{{"lr", 0.5}});
  Threads threads(1);
  at::manual_seed(0);
  const at::Tensor gradient = at::randn({2001});
  const auto updated = [&](double scale) {
    const at::Tensor parameter = at::linspace(1, 2, 2001);
    State state;
    const auto scaled = gradient * (1 / scale);
    std::vector<Update> updates{{.parameter = &parameter, .gradient = &scaled, .state = &state}};
    const Step step{.hyper = hyper, .gradient_scale = scale};
    functional->measure(step, updates, threads);
    functional->update(step, updates, threads);
    return std::pair(parameter, state.tensors.at(0));
  };
  const auto [parameter, state] = updated(1);
  const auto [scaled_parameter, scaled_state] = updated(0.25);
  EXPECT_TRUE(at::equal(scaled_parameter, parameter));
  EXPECT_TRUE(at::equal(scaled_state, state));
}

TEST(Registry, ALibraryWithoutAnOptimizerIsAnErrorThatNamesIt) {
  Registry registry;
  EXPECT_THAT(usage_error_of([&] { registry.load("/nowhere.so"); }), HasSubstr("no optimizer in /nowhere.so: "));
  EXPECT_EQ(usage_error_of([&] { registry.load("libm.so.6"); }),
            "no optimizer in libm.so.6: it does not export lamina_optimizer");
  EXPECT_THAT(usage_error_of([&] { registry.load(NAMELESS_PLUGIN); }),
              HasSubstr("Nameless lacks names of its hyper-parameters, states or numbers"));
}

}  // namespace
}  // namespace lamina::optim
