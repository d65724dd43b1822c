// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/own_clock.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <thread>
#include <vector>

#include "lamina/base/deadline.h"

namespace lamina::base::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

nanoseconds processor_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
}

TEST(OwnClock, StandsWhileOthersHaveTheProcessor) {
  if (::access("/proc/thread-self/schedstat", R_OK) != 0) GTEST_SKIP() << "this system tells of no waits";
  std::atomic<bool> done = false;
  std::vector<std::jthread> others;
  for (unsigned i = 0; i < 3 * std::thread::hardware_concurrency(); ++i) {
    others.emplace_back([&] {
      while (!done) {
      }
    });
  }
  OwnClock clock;
  const auto own = clock.now(), computed = processor_time();
  const auto began = Clock::now();
  while (processor_time() - computed < milliseconds(100)) {
  }
  const auto waited = Clock::now() - began - (processor_time() - computed);
  const auto counted = clock.now() - own - (processor_time() - computed);
  done = true;
  EXPECT_GT(waited, milliseconds(30));
  EXPECT_LT(counted, waited / 2);
}

TEST(OwnClock, GoesOnInASleep) {
  OwnClock clock;
  const auto began = clock.now();
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_GT(clock.now() - began, milliseconds(20));
}

}  // namespace
}  // namespace lamina::base::testing
