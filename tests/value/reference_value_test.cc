// SPDX-License-Identifier: Apache-2.0
// Arrivals for a reference that are not what was expected, are an error, or will never come.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/value/released.h"
#include "tests/value/refusal.h"
#include "tests/value/sources.h"

namespace lamina::value {
namespace {

using testing::HasSubstr;

at::Tensor some_value() { return at::arange(6, at::kFloat).view({2, 3}); }

TEST(ReferenceValue, AWrongValueIsAnErrorThatNamesBoth) {
  const auto expected = spec_of(some_value());
  const std::vector<std::pair<std::string, at::Tensor>> wrong = {
      {"shape [2, 4]", at::ones({2, 4})},
      {"shape [6]", at::ones({6})},
      {"strides [1, 2]", at::ones({3, 2}).t()},
      {"Double", at::ones({2, 3}, at::kDouble)},
      {"meta", at::ones({2, 3}, at::kMeta)},
      {"Sparse", at::ones({2, 3}).to_sparse()},
      {"CPUFloatType", at::_efficientzerotensor({2, 3}, at::kFloat)},
      {"none", at::Tensor()},
  };
  for (const auto& [what, value] : wrong) {
    const auto source = std::make_shared<Made>([value = value] { return value; });
    const auto tensor = make_reference(expected, source, Strides::kAsSpecified);
    for (int time = 0; time < 2; ++time) {
      const auto text = refusal<base::UsageError>([&] { tensor.sum(); });
      EXPECT_THAT(text, HasSubstr("expected a dense tensor (shape [2, 3], strides [3, 1], Float, cpu), got"));
      EXPECT_THAT(text, HasSubstr(what));
    }
    EXPECT_TRUE(is_pending(tensor));
  }
}

TEST(ReferenceValue, TheStrideOfADimensionOfOneIsNoDifference) {
  const auto value = at::arange(3, at::kFloat).as_strided({1, 3}, {7, 1});
  const auto tensor = make_reference(spec_of(at::ones({1, 3})), std::make_shared<Made>(value), Strides::kAsSpecified);
  EXPECT_TRUE(at::equal(tensor, value));
  EXPECT_EQ(tensor.strides(), (std::vector<std::int64_t>{3, 1}));
}

TEST(ReferenceValue, AGradientTakesTheStridesThatArrive) {
  const auto expanded = at::ones({}).expand({2, 3});
  const auto tensor = make_reference(spec_of(some_value()), std::make_shared<Made>(expanded), Strides::kAsTheyArrive);
  EXPECT_TRUE(at::equal(tensor, at::ones({2, 3})));
  EXPECT_EQ(tensor.strides(), expanded.strides());
  EXPECT_EQ(reference(at::ones({2, 3}), Strides::kAsTheyArrive).detach().sum().item<float>(), 6);
}

TEST(ReferenceValue, AFailedSourceThrowsEachTime) {
  const auto source = std::make_shared<Made>([]() -> at::Tensor { throw std::runtime_error("rank 1 failed"); });
  const auto tensor = make_reference(spec_of(some_value()), source, Strides::kAsSpecified);
  for (const std::function<void()>& use :
       {std::function<void()>([&] { tensor.sum(); }), std::function<void()>([&] { tensor.storage(); }),
        std::function<void()>([&] { tensor.detach().data_ptr(); }), std::function<void()>([&] { tensor.sum(); })}) {
    EXPECT_EQ(refusal<std::runtime_error>(use), "rank 1 failed");
  }
  EXPECT_TRUE(is_pending(tensor));
  EXPECT_EQ(source->takes(), 4);
  EXPECT_EQ(tensor.size(1), 3);
}

TEST(ReferenceValue, MayBeReleased) {
  auto tensor = reference(some_value());
  release(tensor, "lives on rank 1");
  EXPECT_TRUE(is_released(tensor) && !is_pending(tensor));
  EXPECT_THAT(refusal<base::UsageError>([&] { tensor.mul(2); }), HasSubstr("lives on rank 1 (aten::mul)"));
}

TEST(ReferenceValue, IsNotWaitedForWhereAReleasedTensorIsRefusedAnyway) {
  const auto pending = reference(some_value());
  auto released = some_value();
  release(released, "lives on rank 1");
  for (const std::function<void()>& use : {std::function<void()>([&] { at::mul(pending, released); }),
                                           std::function<void()>([&] { at::add(pending, released); }),
                                           std::function<void()>([&] { at::cat({pending, released}); })}) {
    EXPECT_THAT(refusal<base::UsageError>(use), HasSubstr("lives on rank 1 (aten::"));
    EXPECT_TRUE(is_pending(pending));
  }
}

}  // namespace
}  // namespace lamina::value
