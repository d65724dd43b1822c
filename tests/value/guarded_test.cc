// SPDX-License-Identifier: Apache-2.0
// See [Note: guarded slices].
#include "lamina/value/guarded.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include "tests/value/refusal.h"

namespace lamina::value {
namespace {

at::Tensor slice() {
  auto tensor = at::arange(12.0).reshape({3, 4}).set_requires_grad(true);
  guard(tensor, "up.weight", {6, 4});
  return tensor;
}

bool refuses(const std::function<void()>& use) {
  return refusal(use).starts_with("up.weight is sliced, and this rank has [3, 4] of its [6, 4]");
}

TEST(Guarded, WhatTakesElementsTogetherIsRefusedWithTheRemedy) {
  const auto weight = slice();
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { weight.sum(); },
           [&] { weight.norm(); },
           [&] { weight.mean(0); },
           [&] { at::linear(at::ones({2, 4}), weight); },
           [&] { weight.matmul(weight.t()); },
           [&] { weight.softmax(0); },
           [&] { at::equal(weight, weight.detach().clone()); },
           [&] { weight.max().item<double>(); },
           [&] { at::_foreach_norm({weight}); },
           [&] { at::linalg_matrix_norm(weight); },
       }) {
    EXPECT_TRUE(refuses(use)) << refusal(use);
  }
  const auto told = refusal([&] { weight.sum(); });
  EXPECT_NE(told.find("lamina.get_full_parameter(parameter)"), std::string::npos) << told;
  EXPECT_NE(told.find("aten::sum"), std::string::npos) << told;
}

TEST(Guarded, RandomNumbersAreThoseOfTheWhole) {
  const at::NoGradGuard no_grad;
  auto weight = slice();
  const auto told = refusal([&] { weight.normal_(0, 1); });
  EXPECT_NE(told.find("initialise it before the model is wrapped"), std::string::npos) << told;
  EXPECT_EQ(refusal([&] { weight.uniform_(-1, 1); }).find("initialise") == std::string::npos, false);
}

TEST(Guarded, WhatComesOfASliceIsOne) {
  const auto weight = slice();
  for (const auto& made : {weight * weight, weight.detach(), weight.t(), weight[0], weight.to(at::kDouble).abs(),
                           at::cat({weight.reshape({-1}), at::ones(2)}), weight.data(), at::ones({3, 4}) - weight}) {
    EXPECT_TRUE(is_guarded(made));
    EXPECT_NE(refusal([&] { made.sum(); }).find("up.weight is sliced"), std::string::npos);
  }
  EXPECT_FALSE(is_guarded(at::zeros_like(weight)));
}

TEST(Guarded, ElementsMayBeChangedOneByOne) {
  const at::NoGradGuard no_grad;
  auto weight = slice();
  auto average = weight.detach().clone();
  weight.clamp_(2, 5).mul_(2).add_(at::ones({3, 4}), 0.5);
  weight.copy_(at::full({3, 4}, 7.0));
  at::_foreach_add_({weight}, 1);
  average.lerp_(weight, 1.0);
  EXPECT_TRUE(at::equal(unguarded(average), at::full({3, 4}, 8.0)));
  const auto told = refusal([&] { weight.copy_(at::ones({6, 4})); });
  EXPECT_NE(told.find("write_back=True"), std::string::npos) << told;
}

TEST(Guarded, StatesOfUpdatesAreNone) {
  const at::NoGradGuard no_grad;
  const auto weight = slice();
  set_updating(true);
  const auto state = at::ones({3, 4}).add(weight, 0.1), product = weight * 2;
  set_updating(false);
  EXPECT_FALSE(is_guarded(state) || is_guarded(product));
  EXPECT_TRUE(is_guarded(weight));
}

TEST(Guarded, WhoKnowsComputesWithTheSlice) {
  const auto weight = slice();
  const auto own = unguarded(weight);
  EXPECT_FALSE(is_guarded(own));
  (own * own).sum().backward();
  EXPECT_TRUE(at::equal(weight.grad(), at::arange(12.0).reshape({3, 4}) * 2));
  const Unguarded own_work;
  EXPECT_EQ(weight.sum().item<double>(), 66);
  EXPECT_TRUE(is_guarded(weight.t()));
}

TEST(Guarded, AnotherValueIsOneUntilItIsGuardedAgain) {
  auto weight = slice();
  const auto kept = weight.data();
  weight.set_data(at::ones({6, 4}));
  EXPECT_EQ(weight.sum().item<double>(), 24);
  weight.set_data(kept);
  guard_again(weight);
  EXPECT_TRUE(refuses([&] { weight.sum(); }));
  EXPECT_EQ(name_guarded(weight), "up.weight");
}

}  // namespace
}  // namespace lamina::value
