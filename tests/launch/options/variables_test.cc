// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/variables.h"

#include <gtest/gtest.h>

namespace lamina::launch {
namespace {

const Variables kEnvironment{"HOME=/home/me", "RANK=3", "EMPTY=", "NAME=a b"};

TEST(Expand, NamesBecomeTheirValues) {
  EXPECT_EQ(expand("out-$RANK.txt", kEnvironment), "out-3.txt");
  EXPECT_EQ(expand("${RANK}0 $NAME$EMPTY", kEnvironment), "30 a b");
}

TEST(Expand, WhatIsNotKnownStays) {
  for (const char* word : {"$NOPE", "${NOPE}", "$$", "$", "${", "${RANK", "a$", "$1", "$ RANK", "$(RANK)", "${}"}) {
    EXPECT_EQ(expand(word, kEnvironment), word);
  }
}

TEST(Expand, ABackslashKeepsAKnownNameAndGoes) {
  EXPECT_EQ(expand("\\$RANK \\${RANK}-$RANK", kEnvironment), "$RANK ${RANK}-3");
  EXPECT_EQ(expand("\\$A$A", {"A=x\\"}), "$Ax\\");
  EXPECT_EQ(expand("$A$A", {"A=x\\"}), "x\\x\\");
  for (const char* word : {"\\$NOPE", "a\\$", "\\", "\\n"}) EXPECT_EQ(expand(word, kEnvironment), word);
}

TEST(Expand, AValueIsNotExpandedAgain) { EXPECT_EQ(expand("$A", {"A=$B", "B=x"}), "$B"); }

TEST(Expand, ALeadingTildeIsTheHomeOfTheRank) {
  EXPECT_EQ(expand("~", kEnvironment), "/home/me");
  EXPECT_EQ(expand("~/x~", kEnvironment), "/home/me/x~");
  EXPECT_EQ(expand("~root/x", kEnvironment), "/root/x");
  EXPECT_EQ(expand("~no-such-user/x", kEnvironment), "~no-such-user/x");
  EXPECT_EQ(expand("a~", kEnvironment), "a~");
}

}  // namespace
}  // namespace lamina::launch
