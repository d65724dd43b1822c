// SPDX-License-Identifier: Apache-2.0
#include "lamina/parameter_server/turns.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/comes_true.h"

namespace lamina::parameter_server {
namespace {

const base::Patience kPatience{std::chrono::seconds(60)};

TEST(Turns, OneThreadHasItAtATime) {
  Turns turns;
  std::atomic<int> inside = 0, most = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 200; ++j) {
        const Turns::Turn turn(turns, kPatience);
        most = std::max(most.load(), ++inside);
        std::this_thread::yield();
        --inside;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(most, 1);
}

TEST(Turns, OthersHaveTheirsInAPause) {
  Turns turns;
  std::vector<int> order;
  const Turns::Turn turn(turns, kPatience);
  {
    const Turns::Pause pause;
    std::thread([&] {
      const Turns::Turn inner(turns, kPatience);
      order.push_back(1);
    }).join();
  }
  order.push_back(2);
  std::thread([&] {  // after the pause nobody else has it
    EXPECT_THROW(Turns::Turn(turns, {std::chrono::milliseconds(1)}), base::TimeoutError);
  })
      .join();
  EXPECT_EQ(order, (std::vector{1, 2}));
}

TEST(Turns, WhoeverWaitsTooLongIsToldAndHoldsNobodyUp) {
  Turns turns;
  {
    const Turns::Turn turn(turns, kPatience);
    std::thread([&] { EXPECT_THROW(Turns::Turn(turns, {std::chrono::milliseconds(1)}), base::TimeoutError); }).join();
  }
  std::thread([&] { const Turns::Turn turn(turns, kPatience); }).join();  // ends
}

}  // namespace
}  // namespace lamina::parameter_server
