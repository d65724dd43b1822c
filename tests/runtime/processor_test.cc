// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/processor.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <thread>
#include <vector>

namespace lamina::runtime {
namespace {

cpu_set_t mine() {
  cpu_set_t processors;
  EXPECT_EQ(::sched_getaffinity(0, sizeof processors, &processors), 0);
  return processors;
}

void allow(const cpu_set_t& processors) { ASSERT_EQ(::sched_setaffinity(0, sizeof processors, &processors), 0); }

void allow_only(int processor) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  allow(one);
}

std::vector<int> numbers(const cpu_set_t& processors) {
  std::vector<int> found;
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &processors)) found.push_back(i);
  }
  return found;
}

// Runs `check` in a thread of its own, with two processors that it may use.
template <class Check>
void with_two_processors(const Check& check) {
  const auto own = numbers(mine());
  if (own.size() < 2) GTEST_SKIP() << "one processor";
  std::thread([&] { check(own[0], own[1]); }).join();
}

TEST(Processor, IsWhereTheLastThreadComputed) {
  with_two_processors([](int here, int there) {
    const auto all = mine();
    int arrived = 0;
    for (int i = 0; i < 50; ++i) {
      Processor processor;
      allow_only(here);
      processor.leave();
      allow_only(there);
      allow(all);
      processor.return_to_it();
      if (::sched_getcpu() == here) ++arrived;
      const auto now = mine();
      EXPECT_TRUE(CPU_EQUAL(&now, &all));
    }
    EXPECT_GT(arrived, 25) << "of 50: the system may move a thread as soon as it has arrived, but not each time";
  });
}

TEST(Processor, ThatIsNotAllowedIsNotUsed) {
  with_two_processors([](int here, int there) {
    Processor processor;
    allow_only(here);
    processor.leave();
    allow_only(there);
    processor.return_to_it();
    EXPECT_EQ(numbers(mine()), std::vector<int>{there});
  });
}

TEST(Processor, OfNobodyIsNowhere) {
  const auto before = mine();
  Processor().return_to_it();
  const auto after = mine();
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

}  // namespace
}  // namespace lamina::runtime
