// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/follow.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "lamina/layout/half.h"

namespace lamina::fused {
namespace {

template <class Half>
void follows(layout::DType dtype) {
  std::vector<float> elements(3 * kBlock + 17);
  std::vector<std::uint16_t> copies;
  for (std::size_t i = 0; i < elements.size(); ++i) {
    elements[i] = 1.0F + static_cast<float>(i) * 1e-7F;  // more than half precision holds
    copies.push_back(Half::narrow(elements[i]));
  }
  auto expected = elements;
  for (const std::size_t written : {std::size_t{3}, 2 * kBlock, elements.size() - 1}) {
    copies[written] = Half::narrow(-3.0F);
    expected[written] = -3.0F;
  }
  Threads threads(2);
  const Copied all{elements.data(), dtype, copies.data(), elements.size()};
  follow({&all, 1}, {.threads = threads, .chunk = kBlock});
  EXPECT_EQ(elements, expected);
  follow({&all, 1}, {.threads = threads});
  EXPECT_EQ(elements, expected);
}

TEST(Follow, TakesWhatWasWrittenAndKeepsThePrecisionOfTheRest) {
  follows<layout::BFloat16>(layout::DType::kBFloat16);
  follows<layout::Float16>(layout::DType::kFloat16);
}

}  // namespace
}  // namespace lamina::fused
