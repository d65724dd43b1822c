// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/declaration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lamina/fused/rules.h"
#include "lamina/fused/update.h"
#include "tests/usage_error.h"

namespace lamina::fused {
namespace {

using testing::ElementsAre;

using GivenHyper = std::vector<std::pair<std::string_view, HyperValue>>;

std::string problem_of(const Rule& rule, const GivenHyper& given) {
  return usage_error_of([&] { check(rule, hyper_values(rule.declaration, given)); });
}

TEST(Declaration, PresetsStandForWhatIsNotGiven) {
  EXPECT_THAT(hyper_values(kSgd.declaration, GivenHyper{{"momentum", 0.9}}), ElementsAre(1e-3, 0.9, 0, 0, 0, 0));
  EXPECT_EQ(problem_of(kQhm, {{"lr", 0.1}, {"nu", 0.7}}), "QHM needs a value of momentum");
  EXPECT_EQ(problem_of(kSgd, {{"moment", 0.1}}), "SGD has no hyper-parameter moment");
}

TEST(Declaration, AChoiceIsTheIndexOfItsWord) {
  const GivenHyper given{{"lr", 0.1}, {"momentum", 0.9}, {"nu", 0.7}, {"weight_decay_type", "direct"}};
  EXPECT_THAT(hyper_values(kQhm.declaration, given), ElementsAre(0.1, 0.9, 0.7, 0, 1));
}

TEST(Declaration, BadValuesAreErrorsInTorchsWords) {
  EXPECT_EQ(problem_of(kSgd, {{"lr", -0.5}}), "Invalid learning rate: -0.5");
  EXPECT_EQ(problem_of(kSgd, {{"lr", kRequired}, {"momentum", -1}}), "Invalid learning rate: nan");
  EXPECT_EQ(problem_of(kSgd, {{"momentum", -0.1}}), "Invalid momentum value: -0.1");
  EXPECT_EQ(problem_of(kSgd, {{"weight_decay", -2}}), "Invalid weight_decay value: -2");
  EXPECT_EQ(problem_of(kSgd, {{"nesterov", 1}}), "Nesterov momentum requires a momentum and zero dampening");
  EXPECT_EQ(problem_of(kSgd, {{"nesterov", 1}, {"momentum", 0.9}, {"dampening", 0.1}}),
            "Nesterov momentum requires a momentum and zero dampening");
  EXPECT_EQ(problem_of(kAdamW, {{"beta1", 1}}), "Invalid beta parameter at index 0: 1");
  EXPECT_EQ(problem_of(kAdam, {{"beta2", -0.5}}), "Invalid beta parameter at index 1: -0.5");
  EXPECT_EQ(problem_of(kAdam, {{"eps", -1}}), "Invalid epsilon value: -1");
  EXPECT_EQ(problem_of(kAdagrad, {{"lr_decay", -1}}), "Invalid lr_decay value: -1");
  EXPECT_EQ(problem_of(kAdadelta, {{"rho", 1.5}}), "Invalid rho value: 1.5");
  EXPECT_EQ(problem_of(kAdadelta, {{"rho", 1}}), "");
  EXPECT_EQ(problem_of(kRprop, {{"etaminus", 1}}), "Invalid eta value at index 0: 1");
  EXPECT_EQ(problem_of(kRprop, {{"etaplus", 1}}), "Invalid eta value at index 1: 1");
  EXPECT_EQ(problem_of(kNovoGrad, {{"norm_type", 1}}), "NovoGrad supports the norms 2 and 0, the largest, only");
  EXPECT_EQ(problem_of(kQhm, {{"lr", 0.1}, {"momentum", 0.9}, {"nu", 1}, {"weight_decay_type", "none"}}),
            "Invalid weight_decay_type value: none");
  EXPECT_EQ(problem_of(kQhm, {{"lr", 0.1}, {"momentum", 0.9}, {"nu", 1}, {"weight_decay_type", 2}}),
            "Invalid weight_decay_type value: 2");
  EXPECT_EQ(problem_of(kAdam, {{"amsgrad", 0.5}}), "Invalid amsgrad: 0.5");
  EXPECT_EQ(usage_error_of([] { check(kAdam, std::vector<double>{1e-3}); }),
            "Adam has 9 hyper-parameters, and was given 1");
}

// A norm is of use only where the holders of a parameter can combine it.
TEST(Declaration, SaysWhatEachRuleNeeds) {
  for (const Rule* rule : rules()) {
    const bool norms = rule == &kLamb || rule == &kNovoGrad;
    EXPECT_EQ(rule->declaration.needs, norms ? Needs::kNorms : Needs::kElements) << rule->declaration.name;
    EXPECT_EQ(rule->declaration.norms.empty(), !norms);
    EXPECT_EQ(rule->declaration.gradient_norm, rule == &kLamb);
    const auto numbers = std::ranges::count_if(rule->declaration.states, is_number, &StateField::kind);
    EXPECT_EQ(numbers, rule == &kSgd || rule == &kQhm ? 0 : rule == &kNovoGrad || rule == &kNAdam ? 2 : 1);
  }
}

}  // namespace
}  // namespace lamina::fused
