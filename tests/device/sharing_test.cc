// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/sharing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lamina::devices {
namespace {

TEST(Sharing, NamesADeviceAmongAllOfItsMachine) {
  const at::Device first(at::kCUDA, 0), second(at::kCUDA, 1);
  EXPECT_EQ(name_on_machine(second, nullptr), "cuda:1");
  EXPECT_EQ(name_on_machine(first, "3"), "cuda:3");
  EXPECT_EQ(name_on_machine(second, "3,GPU-7d1,0"), "cuda:GPU-7d1");
}

TEST(Sharing, IsOfRanksOnOneDeviceOfOneMachine) {
  const std::vector<std::string> one{"cuda:0"}, all{"cuda:0", "cuda:1"};
  EXPECT_FALSE(are_shared(std::vector<Seat>{{0, "cuda:0", one}, {0, "cuda:1", {"cuda:1"}}, {1, "cuda:0", one}}));
  EXPECT_TRUE(are_shared(std::vector<Seat>{{0, "cuda:0", all}, {1, "cuda:1", all}, {1, "cuda:1", all}}));
}

TEST(Sharing, IsToldWhileTheRanksSeeAnIdleDevice) {
  const std::vector<std::string> one{"cuda:1"}, all{"cuda:0", "cuda:1"};
  EXPECT_THAT(told_of_idle(std::vector<Seat>{{0, "cuda:1", all}, {0, "cuda:1", all}}),
              testing::HasSubstr("ranks 0, 1 compute on one device, cuda:1, while cuda:0 of their machine is idle"));
  EXPECT_EQ(told_of_idle(std::vector<Seat>{{0, "cuda:1", one}, {0, "cuda:1", one}}), "");
  EXPECT_EQ(told_of_idle(std::vector<Seat>{{0, "cuda:1", all}, {0, "cuda:0", all}, {0, "cuda:0", all}}), "");
}

}  // namespace
}  // namespace lamina::devices
