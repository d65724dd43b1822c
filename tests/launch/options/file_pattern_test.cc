// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/file_pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::launch {
namespace {

const Layout kSecondOfTwo{.processes = 4, .world_size = 8, .base_rank = 4, .node_rank = 1, .nodes = 2};

std::string name(const std::string& text, int local_rank = 3, const Layout& layout = kSecondOfTwo) {
  return FilePattern(text, "--stdout").name(layout, local_rank);
}

TEST(FilePattern, FillsItsFieldsIn) {
  EXPECT_EQ(name("logs/{rank}-{local_rank}-{world_size}-{node_rank}-{local_world_size}.txt"), "logs/7-3-8-1-4.txt");
  EXPECT_EQ(name("plain"), "plain");
}

TEST(FilePattern, FillsNumbersWithZeros) {
  EXPECT_EQ(name("{rank:03}"), "007");
  EXPECT_EQ(name("{rank:03d}"), "007");
  EXPECT_EQ(name("{rank:1}"), "7");
}

TEST(FilePattern, DoubledBracesAreBraces) { EXPECT_EQ(name("{{rank}}"), "{rank}"); }

TEST(FilePattern, WrongFieldsAreNamedWithThoseThereAre) {
  for (const std::string wrong : {"{frank}", "{}", "{rank", "rank}", "{rank:x}", ""}) {
    EXPECT_THAT([&] { FilePattern(wrong, "--stderr"); },
                ::testing::ThrowsMessage<base::ConfigError>(::testing::AllOf(
                    ::testing::StartsWith("--stderr " + wrong), ::testing::HasSubstr("{local_world_size}"))));
  }
}

TEST(FilePattern, KnowsWhenRanksWouldShareAFile) {
  const auto shared = [](const std::string& text, const Layout& layout) {
    return FilePattern(text, "--stdout").shared(layout);
  };
  EXPECT_TRUE(shared("log", kSecondOfTwo));
  EXPECT_TRUE(shared("{local_rank}", kSecondOfTwo)) << "the machines may share a file system";
  EXPECT_TRUE(shared("{node_rank}", kSecondOfTwo));
  EXPECT_FALSE(shared("{rank}", kSecondOfTwo));
  EXPECT_FALSE(shared("{node_rank}-{local_rank}", kSecondOfTwo));
  EXPECT_FALSE(shared("log", {.processes = 2, .world_size = 2})) << "the first rank has no file";
  EXPECT_FALSE(shared("{local_rank}", {.processes = 4, .world_size = 4}));
}

}  // namespace
}  // namespace lamina::launch
