// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/machine.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace lamina::launch {
namespace {

class GpusTest : public testing::Test {
 protected:
  GpusTest() {
    std::filesystem::create_directories(folder_);
    for (const char* name : {"nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"}) {
      std::ofstream(folder_ + "/" + name) << "";
    }
  }
  ~GpusTest() override { std::filesystem::remove_all(folder_); }

  int count(std::optional<std::string> list) const {
    return visible_gpus([&](const std::string&) { return list; }, folder_);
  }

  const std::string folder_ = testing::TempDir() + "gpus-" + std::to_string(::getpid());
};

TEST_F(GpusTest, TheNumberedDevicesCount) { EXPECT_EQ(count({}), 3); }

TEST_F(GpusTest, TheListNarrowsThemAsCudaReadsIt) {
  EXPECT_EQ(count("1"), 1);
  EXPECT_EQ(count("2, 0"), 2);
  EXPECT_EQ(count("GPU-1a2b,0"), 2);
  EXPECT_EQ(count(""), 0);
  EXPECT_EQ(count("-1"), 0);
  EXPECT_EQ(count("0,-1,1"), 1);
  EXPECT_EQ(count("0,7,1"), 1);
  EXPECT_EQ(count("0,0"), 0);
  EXPECT_EQ(count("MIG-a,MIG-b"), 1);
}

TEST_F(GpusTest, AListOfNothingThatIsThereIsNone) {
  EXPECT_EQ(visible_gpus([](const std::string&) { return std::optional<std::string>("0,1"); }, "/no/such/folder"), 0);
}

}  // namespace
}  // namespace lamina::launch
