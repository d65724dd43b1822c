// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/offsets.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lamina::pipeline {
namespace {

at::Tensor whole(std::vector<std::int64_t> values) { return at::tensor(values, at::kLong); }

bool looks(const at::Tensor& tensor, std::vector<std::int64_t> lengths, bool is_called_so = false) {
  return looks_like_offsets(tensor, lengths, is_called_so);
}

TEST(Offsets, AreFoundByTheLengthOfAnotherTensor) {
  EXPECT_TRUE(looks(whole({0, 4, 4, 10}), {4, 10}));              // the ends of packed sequences
  EXPECT_TRUE(looks(whole({0, 3, 5, 8}).to(at::kInt), {4, 12}));  // bags
}

TEST(Offsets, AreFoundByTheirNameWhereTheyAreFew) {
  EXPECT_FALSE(looks(whole({0, 3}), {2, 12}));
  EXPECT_TRUE(looks(whole({0, 3}), {2, 12}, /*is_called_so=*/true));
}

TEST(Offsets, AreNotWhatHasAValueForEachRow) {
  EXPECT_FALSE(looks(at::arange(8), {8, 64}));              // numbers of samples
  EXPECT_FALSE(looks(whole({0, 0, 1, 1}), {4, 12}));        // sorted classes
  EXPECT_FALSE(looks(whole({0, 0, 0, 0}), {4, 12}, true));  // all of one class
  EXPECT_FALSE(looks(whole({1, 3, 5, 12}), {4, 12}));
  EXPECT_FALSE(looks(whole({0, 5, 3, 12}), {4, 12}));
  EXPECT_FALSE(looks(at::arange(4.0), {4, 12}));
  EXPECT_FALSE(looks(whole({0, 4, 8, 12}).view({2, 2}), {2, 12}));
}

}  // namespace
}  // namespace lamina::pipeline
