// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/oom.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace lamina::launch {
namespace {

class OomCounterTest : public ::testing::Test {
 protected:
  void write(const std::string& text) const { std::ofstream(file_) << text; }
  ~OomCounterTest() override { std::filesystem::remove(file_); }

  const std::string file_ = ::testing::TempDir() + "/memory.events";
};

TEST_F(OomCounterTest, TellsKillsSinceItWasMade) {
  write("low 0\noom 3\noom_kill 2\n");
  const OomCounter counter(file_);
  EXPECT_FALSE(counter.increased());
  write("low 0\noom 9\noom_kill 2\n");
  EXPECT_FALSE(counter.increased()) << "memory was short, and nobody was killed";
  write("low 0\noom 9\noom_kill 3\n");
  EXPECT_TRUE(counter.increased());
}

TEST_F(OomCounterTest, WhereNothingIsToldNothingIsClaimed) {
  const OomCounter counter(file_ + "-missing");
  EXPECT_FALSE(counter.increased());
}

}  // namespace
}  // namespace lamina::launch
