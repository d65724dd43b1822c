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

bool refuses(const std::function<void()>& use, const std::string& whose = "") {
  return refusal(use).starts_with("up.weight is sliced, and this rank has [3, 4] of its " + whose + "[6, 4]");
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
  for (const auto& made :
       {weight * weight, weight.detach(), weight.t(), weight.select(1, 0), weight.to(at::kDouble).abs(),
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

TEST(Guarded, PlacesAlongTheCutAreRefused) {
  const auto weight = slice();
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { weight[0]; },
           [&] { weight.slice(0, 0, 2); },
           [&] { weight.slice(0, 0, 3); },  // all that is here
           [&] { weight.slice(0, 0, 6, 2); },
           [&] { weight.narrow(0, 0, 2); },
           [&] { weight.chunk(3); },
           [&] { weight.split(1); },
           [&] { weight.split_with_sizes({1, 2}); },
           [&] { weight.unbind(); },
           [&] { weight.diagonal(); },
           [&] { weight.unfold(1, 2, 1); },
           [&] { weight.as_strided({2}, {1}); },
           [&] { weight.t().select(1, 0); },
           [&] { weight.unsqueeze(0).select(-2, 0); },
           [&] { (weight * 2).select(0, 0); },
           [&] { (weight * at::ones({2, 1, 1})).select(1, 0); },
           [&] { weight.view({-1}).select(0, 0); },
           [&] { weight.view({-1}).slice(0, 0, 3); },
           [&] { weight.view({-1}).slice(0, 0, 12); },  // all that is here
           [&] { weight.t()[0].slice(0, 1); },
           [&] { weight.view({3, 2, 2}).select(0, 0); },
           [&] { weight.view({6, 2}).select(1, 0); },
           [&] { weight.index_select(0, at::zeros({1}, at::kLong)); },
           [&] { weight.index({at::zeros({1}, at::kLong)}); },
           [&] { weight.masked_select(weight.detach() > 3); },
       }) {
    EXPECT_NE(refusal(use).find("up.weight is sliced"), std::string::npos) << refusal(use);
  }
}

TEST(Guarded, PlacesAlongOtherDimensionsAreThoseOfTheWhole) {
  const at::NoGradGuard no_grad;
  const auto weight = slice();
  weight.select(1, 0).fill_(7);
  weight.t()[1].zero_();
  weight.unsqueeze(0)[0].slice(1, 2).mul_(0);
  weight.slice(0, 0, 6).add_(1);
  weight.slice(0).chunk(4, 1)[3].add_(weight.split(1, -1)[3]);
  (weight * at::ones({2, 1, 1})).select(0, 0);
  weight.view({3, 2, 2}).select(1, 0);
  EXPECT_TRUE(at::equal(unguarded(weight), at::tensor({8.0, 1.0, 1.0, 2.0}, at::kFloat).expand({3, 4})));
  EXPECT_TRUE(is_guarded(weight.view({-1}).slice(0).slice(0, 0, 24)) && is_guarded(weight.split(6)[0]));
}

TEST(Guarded, PlacesOfWhatWasJoinedAreThoseOfItsParts) {
  const at::NoGradGuard no_grad;
  const auto weight = slice();
  const auto joined = at::cat({at::zeros(3), weight.view({-1}), at::ones(2)}) * 2;
  EXPECT_TRUE(is_guarded(joined.slice(0, 3, 15).view_as(weight)));
  EXPECT_TRUE(at::equal(joined.slice(0, 15), at::full({2}, 2.0)));
  EXPECT_TRUE(at::equal(joined.split_with_sizes({3, 12, 2})[2], at::full({2}, 2.0)));
  EXPECT_EQ(joined[1].item<double>() + joined.slice(0, 0, 2).sum().item<double>(), 0);  // before the slice
  EXPECT_TRUE(is_guarded(joined.slice(0, 0, 15)) && is_guarded(joined.slice(0, 0, 15).slice(0, 3)));
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { joined.sum(); },
           [&] { joined[3]; },
           [&] { joined[16]; },  // of a whole, which has another place in a vector of wholes
           [&] { joined.slice(0, 0, 4); },
           [&] { joined.slice(0, -1); },
           [&] { joined.slice(0, 0, 17, 2); },
           [&] { joined.chunk(2); },
           [&] { joined.unbind(); },
           [&] { joined.as_strided({2}, {1}); },
           [&] { joined.view({1, -1}).select(1, 0); },
       }) {
    EXPECT_TRUE(refuses(use)) << refusal(use);
  }
}

TEST(Guarded, AListOfSlicesHasTheirPlaces) {
  const at::NoGradGuard no_grad;
  const auto weight = slice();
  const auto stacked = at::stack({weight, weight + 1}, 1), beside = at::cat({weight, weight}, 1);
  EXPECT_TRUE(is_guarded(stacked.select(1, 1).select(1, 0)) && is_guarded(stacked.unbind(1)[0]));
  EXPECT_TRUE(at::equal(unguarded(beside.slice(1, 4)), unguarded(weight)));
  auto other = at::ones({3, 4});
  guard(other, "down.weight", {3, 8});
  const auto apart = at::stack({weight, other, at::ones({3, 4})});
  EXPECT_EQ(name_guarded(apart[1]) + name_guarded(apart[2]), "down.weight");
  EXPECT_TRUE(is_guarded(apart[0].select(1, 0)) && is_guarded(apart[1].select(0, 0)));
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { stacked[0]; },
           [&] { beside[0]; },
           [&] { at::cat({weight, weight})[0]; },
           [&] { apart.select(1, 0); },
           [&] { apart.select(2, 0); },
           [&] { apart[0].select(0, 0); },
       }) {
    EXPECT_TRUE(refuses(use)) << refusal(use);
  }
}

TEST(Guarded, SlicesOfDifferentDimensionsAreNotComputedWithOneAnother) {
  auto up = at::ones({4, 4}), down = at::ones({4, 4});
  guard(up, "up.weight", {8, 4});
  guard(down, "down.weight", {4, 8});
  EXPECT_NE(refusal([&] { up + up.t(); }).find("up.weight is sliced"), std::string::npos);
  EXPECT_NE(refusal([&] { up.mul_(down); }).find("up.weight is sliced"), std::string::npos);
  const auto twice = at::_foreach_mul({at::ones(2), down, up}, 2);
  EXPECT_EQ(name_guarded(twice[0]) + "," + name_guarded(twice[1]) + "," + name_guarded(twice[2]),
            ",down.weight,up.weight");
  EXPECT_TRUE(is_guarded(up + down.t()));
}

TEST(Guarded, TheGradientOfASliceIsOne) {
  const auto weight = slice();
  (unguarded(weight) * 2).sum().backward();
  auto gradient = weight.grad();
  {
    const Unguarded own_work;
    guard_gradient(gradient, weight);
  }
  EXPECT_FALSE(is_guarded(gradient));
  guard_gradient(gradient, weight);
  const auto told = refusal([&] { gradient.norm(); });
  EXPECT_TRUE(told.starts_with("up.weight is sliced, and this rank has [3, 4] of its gradient's [6, 4]")) << told;
  EXPECT_NE(told.find("lamina.get_full_gradient(parameter)"), std::string::npos) << told;
  EXPECT_TRUE(refuses([&] { gradient.pow(2).sum(); }, "gradient's "));
  EXPECT_TRUE(refuses([&] { gradient[0]; }, "gradient's "));
  (unguarded(weight) * 3).sum().backward();
  gradient.mul_(2);
  EXPECT_TRUE(at::equal(unguarded(weight.grad()), at::full({3, 4}, 10.0)));
}

TEST(Guarded, OnlyWorkOfTheProgramIsJudgedInABackward) {
  const auto weight = slice();
  std::string told;
  weight.register_hook([&](const at::Tensor& gradient) {
    guard_gradient(gradient, weight);
    gradient.sum();
    const Judged hook;
    told = refusal([&] { gradient.sum(); });
  });
  (unguarded(weight) * 2).sum().backward();
  EXPECT_TRUE(told.starts_with("up.weight is sliced")) << told;
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
