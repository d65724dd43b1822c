// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/overlaps.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

namespace lamina::model {
namespace {

using Groups = std::vector<std::vector<std::size_t>>;

TEST(Overlaps, AreViewsOfOneMemoryAndNotPartsThatDoNotMeet) {
  const auto whole = at::zeros({4, 4});
  const std::vector<at::Tensor> tensors{whole.t(), at::zeros({4}), whole.narrow(0, 1, 2),
                                        whole.narrow(0, 3, 1).detach()};
  EXPECT_EQ(overlaps(tensors), (Groups{{0, 2, 3}}));
  EXPECT_EQ(overlaps(std::vector{whole.narrow(0, 0, 2), whole.narrow(0, 2, 2)}), Groups());
}

TEST(Overlaps, AreSeenWhereEachTensorHasNamedTheMemoryItself) {
  std::vector<float> memory(8);
  const auto first = at::from_blob(memory.data(), {4}), second = at::from_blob(memory.data() + 3, {4});
  EXPECT_EQ(overlaps(std::vector{first, second}), (Groups{{0, 1}}));
}

TEST(Overlaps, AreNotOfTensorsWithoutMemory) {
  const auto meta = at::empty({4}, at::kMeta);
  EXPECT_EQ(overlaps(std::vector{meta, meta.view({2, 2}), at::Tensor(), at::zeros({0})}), Groups());
}

}  // namespace
}  // namespace lamina::model
