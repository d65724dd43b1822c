// SPDX-License-Identifier: Apache-2.0
// References in a graph of autograd: their history, and gradients that are references.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include "tests/value/remote_scale.h"

namespace lamina::value {
namespace {

at::Tensor leaf() { return at::ones({3}).set_requires_grad(true); }

TEST(ReferenceGradient, EdgeAndHooksSurviveBecoming) {
  const auto x = leaf();
  const auto y = remote({x * 1}, 2);
  const auto* node = y.grad_fn().get();
  std::vector<at::Tensor> seen;
  y.register_hook([&](const at::Tensor& gradient) { seen.push_back(gradient.clone()); });
  y.retain_grad();
  EXPECT_TRUE(is_pending(y)) << "neither needs the value";
  materialise(y);
  EXPECT_EQ(y.grad_fn().get(), node);
  EXPECT_TRUE(y.requires_grad() && y.retains_grad());
  (y * 5).sum().backward();
  ASSERT_EQ(seen.size(), 1U);
  EXPECT_TRUE(at::equal(seen[0], at::full({3}, 5.)));
  EXPECT_TRUE(at::equal(y.grad(), at::full({3}, 5.)));
  EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 10.)));
}

TEST(ReferenceGradient, PassesFromCallToCallUnread) {
  for (const bool keep : {true, false}) {
    const auto a = remote({leaf()}, 2, {.keep = keep});
    const auto b = remote({a}, 3, {.keep = keep});
    const auto gradient = torch::autograd::grad({b}, {a}, {at::ones({3})}).at(0);
    EXPECT_TRUE(is_pending(gradient));
    EXPECT_EQ(call_of(b).given.at(0)->takes(), 0);
    EXPECT_TRUE(at::equal(gradient, at::full({3}, 3.)));
  }
}

TEST(ReferenceGradient, AReferenceThatRequiresGradIsALeaf) {
  auto y = reference(at::ones({3})).set_requires_grad(true);
  const auto z = remote({y}, 4);
  z.backward(at::ones({3}));
  EXPECT_TRUE(is_pending(y)) << "only its consumer needs its value";
  EXPECT_TRUE(at::equal(y.grad(), at::full({3}, 4.)));
}

TEST(ReferenceGradient, WritingInPlaceKeepsTheHistory) {
  const auto x = leaf();
  const auto y = remote({x}, 2);
  y.mul_(5);
  EXPECT_TRUE(at::equal(y, at::full({3}, 10.)));
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 10.)));
}

TEST(ReferenceGradient, ASavedTensorThatIsWrittenIsStillAnError) {
  const auto y = remote({leaf()}, 2);
  const auto square = y * y;
  y.add_(1);
  EXPECT_THROW(square.sum().backward(), c10::Error);
}

TEST(ReferenceGradient, TheSeedOfABackwardMayBeAReference) {
  const auto x = leaf();
  (x * 2).backward(reference(at::full({3}, 7.), Strides::kAsTheyArrive));
  EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 14.)));
}

}  // namespace
}  // namespace lamina::value
