// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace lamina::environment {
namespace {

class MemoryTest : public ::testing::Test {
 protected:
  MemoryTest() : root_(std::filesystem::path(::testing::TempDir()) / "lamina_memory") {
    std::filesystem::remove_all(root_);
  }
  ~MemoryTest() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::optional<std::int64_t> available() const { return available_memory(root_.string() + "/"); }

 private:
  const std::filesystem::path root_;
};

constexpr auto kMachine = "MemTotal:       2000 kB\nMemAvailable:   1000 kB\n";

TEST_F(MemoryTest, IsUnknownWhereTheSystemDoesNotSay) { EXPECT_EQ(available(), std::nullopt); }

TEST_F(MemoryTest, IsWhatTheMachineHas) {
  write("proc/meminfo", kMachine);
  write("sys/fs/cgroup/memory.max", "max\n");
  write("sys/fs/cgroup/memory.current", "12345\n");
  EXPECT_EQ(available(), 1000 * 1024);
}

TEST_F(MemoryTest, IsWhatTheControlGroupLeavesWhereThatIsLess) {
  write("proc/meminfo", kMachine);
  write("sys/fs/cgroup/memory.max", "500000\n");
  write("sys/fs/cgroup/memory.current", "100000\n");
  write("sys/fs/cgroup/memory.stat", "anon 60000\ninactive_file 30000\nactive_file 10000\n");
  EXPECT_EQ(available(), 430000);
}

TEST_F(MemoryTest, KnowsControlGroupsOfTheFirstVersion) {
  write("proc/meminfo", kMachine);
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "500000\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "600000\n");
  EXPECT_EQ(available(), 0);
}

TEST(Memory, OfThisMachineIsSomeMebibytesAtLeast) {
  const auto here = available_memory();
  ASSERT_TRUE(here.has_value());
  EXPECT_GT(*here, 1 << 20);
}

}  // namespace
}  // namespace lamina::environment
