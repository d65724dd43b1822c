// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "tests/optim/steps.h"

namespace lamina::optim {
namespace {

using Params = std::vector<at::Tensor>;

struct Case {
  std::string label, name;
  GivenHyper given;
  std::function<std::unique_ptr<torch::optim::Optimizer>(Params)> torchs;
};

template <class Class, class Options>
auto making(const Options& options) {
  return [options](Params parameters) { return std::make_unique<Class>(parameters, options); };
}

std::vector<Case> cases() {
  using namespace torch::optim;
  return {
      {"Sgd", "SGD", {{"lr", 0.1}}, making<SGD>(SGDOptions(0.1))},
      {"SgdDampening",
       "SGD",
       {{"lr", 0.1}, {"momentum", 0.9}, {"dampening", 0.2}, {"weight_decay", 0.1}},
       making<SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.2).weight_decay(0.1))},
      {"SgdNesterov",
       "SGD",
       {{"lr", 0.1}, {"momentum", 0.9}, {"nesterov", 1}},
       making<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true))},
      {"Adam", "Adam", {{"weight_decay", 0.1}}, making<Adam>(AdamOptions().weight_decay(0.1))},
      {"AdamAmsgrad", "Adam", {{"amsgrad", 1}}, making<Adam>(AdamOptions().amsgrad(true))},
      {"AdamW", "AdamW", {{"lr", 0.01}, {"eps", 1e-6}}, making<AdamW>(AdamWOptions(0.01).eps(1e-6))},
      {"AdamWAmsgrad",
       "AdamW",
       {{"amsgrad", 1}, {"beta2", 0.5}},
       making<AdamW>(AdamWOptions().amsgrad(true).betas({0.9, 0.5}))},
      {"RmsProp",
       "RMSprop",
       {{"momentum", 0.9}, {"centered", 1}, {"eps", 1e-2}},
       making<RMSprop>(RMSpropOptions().momentum(0.9).centered(true).eps(1e-2))},
      {"Adagrad",
       "Adagrad",
       {{"lr_decay", 0.1}, {"weight_decay", 0.1}, {"initial_accumulator_value", 0.5}},
       making<Adagrad>(AdagradOptions().lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.5))},
  };
}

class AgainstTorch : public ::testing::TestWithParam<std::tuple<Case, at::ScalarType, Way>> {};

TEST_P(AgainstTorch, StaysTheSameToRoundingOver50Steps) {
  const auto& [given, dtype, way] = GetParam();
  at::manual_seed(1);
  Params theirs, ours;
  for (const auto& shape : std::vector<std::vector<std::int64_t>>{{}, {0, 3}, {7}, {33, 65}, {2, 3, 5}}) {
    theirs.push_back(at::randn(shape, dtype).requires_grad_());
    ours.push_back(theirs.back().detach().clone());
  }
  Optimizer optimizer(given.name, given.given, way);
  const auto reference = given.torchs(theirs);
  for (int i = 0; i < 50; ++i) {
    Params gradients;
    for (auto& parameter : theirs) {
      gradients.push_back(at::randn_like(parameter));
      parameter.mutable_grad() = gradients.back().clone();
    }
    reference->step();
    optimizer.step(ours, gradients);
  }
  const double tolerance = dtype == at::kDouble ? 1e-12 : 5e-6;
  for (std::size_t i = 0; i < ours.size(); ++i) {
    EXPECT_TRUE(at::allclose(ours[i], theirs[i].detach(), tolerance, tolerance)) << ours[i].sizes();
  }
}

INSTANTIATE_TEST_SUITE_P(All, AgainstTorch,
                         ::testing::Combine(::testing::ValuesIn(cases()), ::testing::Values(at::kFloat, at::kDouble),
                                            ::testing::ValuesIn(kWays)),
                         [](const auto& info) {
                           return std::get<0>(info.param).label + at::toString(std::get<1>(info.param)) +
                                  name_of(std::get<2>(info.param));
                         });

}  // namespace
}  // namespace lamina::optim
