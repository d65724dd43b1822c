// SPDX-License-Identifier: Apache-2.0
#include "lamina/shared_memory/arena.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <thread>
#include <vector>

namespace lamina::shared_memory {
namespace {

constexpr std::size_t kBegin = 4096, kBytes = 1 << 20;

std::shared_ptr<Arena> arena() { return std::make_shared<Arena>(Segment(kBegin + kBytes), kBegin); }

TEST(Arena, GivesFreedMemoryOutAgainTheLowestFirst) {
  const auto from = arena();
  auto first = from->allocate(1000), second = from->allocate(1);
  EXPECT_EQ(from->offset_of(first.get()), kBegin);
  EXPECT_EQ(from->offset_of(second.get()), kBegin + 1024);
  first.reset();
  EXPECT_EQ(from->offset_of(from->allocate(1024).get()), kBegin);
  EXPECT_EQ(from->offset_of(from->allocate(1025).get()), kBegin + 1024 + 64);
}

TEST(Arena, HasNoneWhereThereIsNoRoom) {
  const auto from = arena();
  EXPECT_EQ(from->allocate(0), nullptr);
  EXPECT_EQ(from->allocate(kBytes + 1), nullptr);
  EXPECT_EQ(from->allocate(SIZE_MAX), nullptr);
  auto all = from->allocate(kBytes);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(from->allocate(1), nullptr);
  all.reset();
  EXPECT_NE(from->allocate(kBytes), nullptr);
  EXPECT_EQ(std::make_shared<Arena>(Segment(kBegin), kBegin)->allocate(1), nullptr);
}

TEST(Arena, KnowsItsOwnMemory) {
  const auto from = arena(), other = arena();
  const auto piece = from->allocate(100);
  EXPECT_EQ(from->offset_of(piece.get() + 99), kBegin + 99);
  EXPECT_EQ(other->offset_of(piece.get()), 0U);
  EXPECT_EQ(from->offset_of(piece.get() - kBegin), 0U);
  EXPECT_EQ(from->offset_of(piece.get() + kBytes), 0U);
}

// Four threads free what others got; nothing is given out twice, and in the end all is one piece.
TEST(Arena, GivesEachPieceToOneAtATime) {
  const auto from = arena();
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937 random(thread);
      std::deque<std::pair<std::shared_ptr<std::byte>, std::size_t>> mine;
      const auto mark = static_cast<std::byte>(thread);
      for (int round = 0; round < 500; ++round) {
        const std::size_t bytes = 1 + random() % 40000;
        if (auto piece = from->allocate(bytes)) {
          std::memset(piece.get(), thread, bytes);
          mine.emplace_back(std::move(piece), bytes);
        }
        while (mine.size() > random() % 8) {
          const auto& [piece, size] = mine.front();
          EXPECT_TRUE(std::all_of(piece.get(), piece.get() + size, [&](std::byte one) { return one == mark; }));
          mine.pop_front();
        }
      }
    });
  }
  threads.clear();
  EXPECT_NE(from->allocate(kBytes), nullptr);
}

TEST(Arena, LeavesItsMemoryToWhoeverHasAPiece) {
  auto from = arena();
  const auto piece = from->allocate(5000);
  from.reset();
  std::memset(piece.get(), 3, 5000);
  EXPECT_EQ(piece.get()[4999], std::byte{3});
}

// A child's exit status says what it found.
TEST(Arena, IsItsParentsInAForkedChild) {
  const auto from = arena();
  auto piece = from->allocate(100);
  *piece = std::byte{1};
  const pid_t child = ::fork();
  if (child == 0) {
    const bool seen = *piece == std::byte{1};
    *piece = std::byte{2};
    piece.reset();
    ::_exit(seen && from->allocate(100) == nullptr ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(*piece, std::byte{2});
  EXPECT_NE(from->offset_of(from->allocate(100).get()), kBegin);
}

}  // namespace
}  // namespace lamina::shared_memory
