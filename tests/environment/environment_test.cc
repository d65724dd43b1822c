// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/environment.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>

namespace lamina::environment {
namespace {

TEST(AvailableCores, AreThoseThatTheProcessMayUse) {
  EXPECT_GE(available_cores(), 1);
  std::thread([] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(::sched_getcpu(), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(available_cores(), 1);
  }).join();
}

}  // namespace
}  // namespace lamina::environment
