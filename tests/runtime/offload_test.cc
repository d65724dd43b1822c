// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/offload.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lamina::runtime {
namespace {

// A device in the host's memory that counts what goes and comes, and when each copy ends.
class Counting : public Mover {
 public:
  bool moves(const at::Tensor& tensor) const override { return tensor.dim() > 0; }
  std::unique_ptr<Copying> to_host(const at::Tensor& tensor) override {
    ++left;
    return std::make_unique<Later>(tensor.clone(), let_go);
  }
  std::unique_ptr<Copying> to_device(const at::Tensor& host) override {
    came.push_back(host[0].item<int>());
    return std::make_unique<Later>(host.clone(), taken);
  }

  int left = 0;
  std::vector<int> let_go, came, taken;  // in the order in which they were, or began to

 private:
  struct Later : Copying {
    Later(at::Tensor made, std::vector<int>& ended) : made_(std::move(made)), ended_(ended) {}
    at::Tensor end() override {
      ended_.push_back(made_[0].item<int>());
      return made_;
    }
    at::Tensor made_;
    std::vector<int>& ended_;
  };
};

class OffloadTest : public ::testing::Test {
 protected:
  void keep(int count, int horizon) {
    offload = std::make_shared<Offload>(horizon, mover);
    for (int i = 0; i < count; ++i) kept.push_back(offload->keep(at::full({3}, i, at::kInt)));
  }
  const std::shared_ptr<Counting> mover = std::make_shared<Counting>();
  std::shared_ptr<Offload> offload;
  std::vector<std::shared_ptr<Offload::Kept>> kept;
};

TEST_F(OffloadTest, WhatWasKeptComesBackTheLatestFirstAndThoseBeforeItAhead) {
  keep(6, 2);
  EXPECT_EQ(mover->left, 6);
  EXPECT_TRUE(at::equal(kept[5]->take(), at::full({3}, 5, at::kInt)));
  EXPECT_EQ(mover->came, (std::vector<int>{5, 4, 3}));
  EXPECT_EQ(mover->taken, (std::vector<int>{5})) << "those ahead come meanwhile";
  kept[5].reset();
  for (int i = 4; i >= 0; --i) {
    EXPECT_TRUE(at::equal(kept[i]->take(), at::full({3}, i, at::kInt)));
    kept[i].reset();
  }
  EXPECT_EQ(mover->came, (std::vector<int>{5, 4, 3, 2, 1, 0})) << "each once";
}

TEST_F(OffloadTest, MemoryIsLetGoOfTwoCopiesLater) {
  keep(5, 1);
  EXPECT_EQ(mover->let_go, (std::vector<int>{0, 1, 2}));
  kept[4]->take();
  EXPECT_EQ(mover->let_go, (std::vector<int>{0, 1, 2, 4, 3}));
}

TEST_F(OffloadTest, AGraphThatIsUsedTwiceFindsItAgain) {
  keep(2, 1);
  EXPECT_TRUE(at::equal(kept[1]->take(), kept[1]->take()));
  EXPECT_TRUE(at::equal(kept[0]->take(), at::zeros({3}, at::kInt)));
}

TEST_F(OffloadTest, WhatLiesInTheHostsMemoryStays) {
  keep(0, 1);
  EXPECT_EQ(offload->keep(at::zeros({})), nullptr);
  EXPECT_EQ(make_device_mover()->moves(at::zeros({3})), false);
}

TEST_F(OffloadTest, WhatIsDroppedLeavesNothing) {
  keep(4, 3);
  kept[2].reset();
  kept[3]->take();
  EXPECT_EQ(mover->came, (std::vector<int>{3, 1, 0}));
}

}  // namespace
}  // namespace lamina::runtime
