// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/worker_pool.h"

#include <gtest/gtest.h>

#include <system_error>

#include "tests/runtime/threads.h"

namespace lamina::runtime {
namespace {

TEST(WorkerPool, RunsAnyNumberOfTasksAtOnce) {
  Gate gate;
  std::atomic<int> running = 0;
  WorkerPool pool({});
  for (int i = 0; i < 50; ++i) {
    pool.run([&] {
      if (++running == 50) gate.open();
      gate.wait();
    });
  }
  gate.wait();
}

TEST(WorkerPool, KeepsItsThreadsForTheNextTask) {
  std::atomic<int> begun = 0, ended = 0;
  {
    WorkerPool pool({[&] { ++begun; }, [&] { ++ended; }});
    for (int i = 0; i < 100; ++i) {
      Gate done;
      pool.run([&done] { done.open(); });
      done.wait();
    }
    EXPECT_LT(begun, 10);
    EXPECT_EQ(ended, 0);
  }
  EXPECT_EQ(ended, begun);
}

TEST(WorkerPool, DestroysATaskInItsThreadBeforeItWaitsAgain) {
  WorkerPool pool({});
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> seen = held;
  pool.run([held = std::move(held)] {});
  const auto deadline = base::Deadline::after(std::chrono::seconds(30));
  while (!seen.expired() && !deadline.expired()) std::this_thread::yield();
  EXPECT_TRUE(seen.expired());
}

TEST(WorkerPool, WithoutThreadsThrowsAndStaysUsable) {
  Gate done;
  WorkerPool pool({});
  no_more_threads = true;
  EXPECT_THROW(pool.run([] {}), std::system_error);
  no_more_threads = false;
  pool.run([&] { done.open(); });
  done.wait();
}

}  // namespace
}  // namespace lamina::runtime
