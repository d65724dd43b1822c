// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/threads.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

namespace lamina::fused {
namespace {

TEST(Threads, WorkOnEachPieceOnce) {
  for (const int count : {1, 2, 7}) {
    Threads threads(count);
    EXPECT_EQ(threads.count(), count);
    for (const std::size_t pieces : {0, 1, 3, 1000}) {
      std::vector<std::atomic<int>> worked(pieces);
      threads.run(pieces, [&](std::size_t i) { ++worked[i]; });
      for (const auto& times : worked) EXPECT_EQ(times, 1);
    }
  }
}

TEST(Threads, HelpWithAPieceWhileAnotherIsWorkedOn) {
  Threads threads(2);
  std::mutex mutex;
  std::condition_variable changed;
  int here = 0;
  threads.run(2, [&](std::size_t) {  // ends only if both are worked on at once
    std::unique_lock lock(mutex);
    ++here;
    changed.notify_all();
    changed.wait(lock, [&] { return here == 2; });
  });
  EXPECT_EQ(here, 2);
}

TEST(Threads, AreDoneWhenTheCallGoesOn) {
  Threads threads(2);
  const auto caller = std::this_thread::get_id();
  for (int round = 0; round < 300; ++round) {
    std::vector<int> worked(2);
    threads.run(2, [&](std::size_t i) {
      for (int wait = 0; std::this_thread::get_id() != caller && wait < 200; ++wait) std::this_thread::yield();
      worked[i] = 1;
    });
    ASSERT_EQ(worked, std::vector<int>(2, 1));
  }
}

TEST(Threads, AreNoneInAForkedChildWhichWorksAloneAndEnds) {
  std::optional<Threads> threads(std::in_place, 3);
  threads->run(100, [](std::size_t) {});
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    std::size_t worked = 0;  // by one thread
    threads->run(1000, [&](std::size_t) { ++worked; });
    threads.reset();
    ::_exit(worked == 1000 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(Threads, ServeSeveralCallersAtOnce) {
  Threads threads(3);
  std::vector<long> sums(4);
  std::vector<std::thread> callers;
  for (long& sum : sums) {
    callers.emplace_back([&threads, &sum] {
      for (int round = 0; round < 200; ++round) {
        std::vector<long> values(50);
        threads.run(values.size(), [&](std::size_t i) { values[i] = static_cast<long>(i); });
        sum += std::accumulate(values.begin(), values.end(), 0L);
      }
    });
  }
  for (auto& caller : callers) caller.join();
  EXPECT_EQ(sums, std::vector<long>(4, 200 * 1225));
}

}  // namespace
}  // namespace lamina::fused
