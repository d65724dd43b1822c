// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/outputs.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/usage_error.h"

namespace lamina::pipeline {
namespace {

using Tensors = std::vector<at::Tensor>;
using Samples = std::vector<std::int64_t>;

TEST(Outputs, AMeanCountsSamples) {
  const Tensors losses{at::full({}, 3.0), at::full({}, 6.0)};
  EXPECT_EQ(mean_of_outputs(losses, Samples{2, 1}).item<double>(), 4.0);
  EXPECT_EQ(mean_of_outputs(losses, Samples{}).item<double>(), 4.5);
  EXPECT_EQ(mean_of_outputs(losses, Samples{3, 3}).item<double>(), 4.5);
}

TEST(Outputs, AMeanOfFewBitsIsTakenInMoreAndOneOfIntegersIsInTheDefaultDtype) {
  const Tensors half(3, at::full({2}, 1000.5, at::kBFloat16));
  EXPECT_TRUE(mean_of_outputs(half, Samples{2, 2, 1}).equal(at::full({2}, 1000.0, at::kBFloat16)));
  const Tensors counts{at::full({}, 1, at::kLong), at::full({}, 2, at::kLong)};
  EXPECT_TRUE(mean_of_outputs(counts, Samples{}).equal(at::full({}, 1.5)));
}

TEST(Outputs, RowsOfOtherNumbersAreConcatenatedAndNotStacked) {
  const Tensors rows{at::ones({2}), at::ones({1})};
  EXPECT_EQ(concat_outputs(rows).sizes(), at::IntArrayRef({3}));
  EXPECT_NE(usage_error_of([&] { stack_outputs(rows); }).find("[2] and [1], which no stack"), std::string::npos);
  EXPECT_NE(usage_error_of([&] { mean_of_outputs(rows, Samples{2, 1}); }).find("[step-outputs-differ]"),
            std::string::npos);
  EXPECT_EQ(concat_outputs(Tensors{at::ones({}), at::ones({})}).sizes(), at::IntArrayRef({2}));
}

TEST(Outputs, AMeanHasTheGraphOfItsParts) {
  const auto weight = at::ones({}).requires_grad_();
  mean_of_outputs(Tensors{weight * 2, weight * 5}, Samples{1, 2}).backward();
  EXPECT_EQ(weight.grad().item<double>(), 4.0);
}

}  // namespace
}  // namespace lamina::pipeline
