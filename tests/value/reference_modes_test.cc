// SPDX-License-Identifier: Apache-2.0
// Reference tensors under the modes of torch, which change what operations do and what tensors are.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "tests/value/sources.h"

namespace lamina::value {
namespace {

// Autocast of CPU operations to bfloat16, as `torch.autocast` does it.
struct Autocast {
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  ~Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST(ReferenceModes, AutocastCastsItAsItCastsAPlainTensor) {
  const auto value = at::rand({3, 3});
  const Autocast autocast;
  const auto product = at::mm(reference(value), reference(value));
  EXPECT_EQ(product.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(product, at::mm(value, value)));
}

TEST(ReferenceModes, TheValueIsMadeWithoutThem) {
  const Autocast autocast;
  const c10::InferenceMode inference;
  const auto source = std::make_shared<Made>([] {
    EXPECT_FALSE(c10::InferenceMode::is_enabled() || at::GradMode::is_enabled());
    const auto product = at::mm(at::ones({2, 2}), at::ones({2, 2}));
    EXPECT_FALSE(product.is_inference());
    return product;
  });
  const auto tensor = make_reference(spec_of(at::ones({2, 2})), source, Strides::kAsSpecified);
  EXPECT_TRUE(at::equal(tensor, at::full({2, 2}, 2.)));
  EXPECT_TRUE(c10::InferenceMode::is_enabled());
}

TEST(ReferenceModes, WithoutGradItHasNoHistory) {
  at::Tensor product;
  auto tensor = reference(at::ones({3})).set_requires_grad(true);
  {
    const at::NoGradGuard no_grad;
    product = tensor * 2;
  }
  EXPECT_FALSE(product.requires_grad());
  EXPECT_TRUE((tensor * 2).requires_grad());
}

TEST(ReferenceModes, MadeInInferenceModeItIsAnInferenceTensor) {
  at::Tensor tensor, detached;
  {
    const c10::InferenceMode inference;
    tensor = reference(at::ones({3}));
    detached = tensor.detach();
    EXPECT_TRUE(is_pending(detached));
  }
  EXPECT_TRUE(tensor.is_inference() && detached.is_inference() && is_pending(tensor));
  EXPECT_EQ((tensor * 2).sum().item<float>(), 6);
  EXPECT_TRUE(tensor.is_inference());
  const c10::InferenceMode inference;
  tensor.add_(1);
  EXPECT_EQ(detached.sum().item<float>(), 6);
}

TEST(ReferenceModes, ReadInInferenceModeItStaysANormalTensor) {
  auto tensor = reference(at::ones({3})).set_requires_grad(true);
  {
    const c10::InferenceMode inference;
    EXPECT_FALSE(tensor.detach().is_inference());
    EXPECT_TRUE((tensor * 2).is_inference());
  }
  EXPECT_FALSE(tensor.is_inference());
  (tensor * 2).sum().backward();
  EXPECT_TRUE(at::equal(tensor.grad(), at::full({3}, 2.)));
}

}  // namespace
}  // namespace lamina::value
