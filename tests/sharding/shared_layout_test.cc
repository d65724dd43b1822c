// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/shared_layout.h"

#include <gtest/gtest.h>

#include <random>

namespace lamina::sharding {
namespace {

TEST(SharedLayout, HasNoTwoThingsInOnePlace) {
  const std::vector<std::size_t> sizes{8, 0, 4096, 72};
  const SharedLayout layout(3, sizes, 5000);
  std::map<std::size_t, std::size_t> places;  // begin to end
  const auto add = [&](std::size_t begin, std::size_t bytes) {
    if (bytes > 0) {
      EXPECT_TRUE(places.emplace(begin, begin + bytes).second) << begin;
    }
  };
  for (int member = 0; member < 3; ++member) {
    add(layout.ended(member), 8);
    add(layout.done(member), 8);
    add(layout.arena(member), 5000);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      add(layout.posted(i, member), 8);
      add(layout.place(i, member), 8);
      add(layout.summed(i, member), 8);
      add(layout.total(i, member), 8);
    }
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) add(layout.value(i), sizes[i]);
  std::size_t end = 0;
  for (const auto& [begin, own_end] : places) {
    EXPECT_GE(begin, end);
    end = own_end;
  }
  EXPECT_LE(end, layout.bytes());
}

TEST(SharedLayout, AWordComesBackAsItWas) {
  for (const auto pass : {-1L, 0L, 1L, 1L << 38}) {
    for (const auto count : {0L, 1L, (1L << 24) - 1}) {
      const auto back = Word::unpack(Word{pass, count}.pack());
      EXPECT_EQ(back.pass, pass);
      EXPECT_EQ(back.count, count);
    }
  }
  EXPECT_EQ(Word::unpack(0).pass, -1) << "memory that nobody has written to";
}

TEST(Pieces, AreTheLowestThatFitAndNeverOverlap) {
  std::mt19937 random(7);
  Pieces pieces(1 << 14);
  std::map<std::size_t, std::size_t> taken;
  for (int i = 0; i < 5000; ++i) {
    if (random() % 2 == 0 && !taken.empty()) {
      const auto each = std::next(taken.begin(), random() % taken.size());
      pieces.give_back(each->first);
      taken.erase(each);
      continue;
    }
    const std::size_t bytes = 1 + random() % 3000;
    const auto begin = pieces.take(bytes);
    std::size_t lowest = 0;
    for (const auto& [other, end] : taken) {
      if (other - lowest >= Pieces::size(bytes)) break;
      lowest = end;
    }
    ASSERT_EQ(begin.has_value(), lowest + Pieces::size(bytes) <= 1 << 14);
    if (!begin) continue;
    ASSERT_EQ(*begin, lowest);
    taken[*begin] = *begin + Pieces::size(bytes);
  }
}

}  // namespace
}  // namespace lamina::sharding
