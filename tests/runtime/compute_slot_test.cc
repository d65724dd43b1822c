// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/compute_slot.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/runtime/activity.h"

namespace lamina::runtime {
namespace {

using base::Microbatch;
using schedule::Phase;

ComputeSlot slot_with(const char* schedule, std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  return ComputeSlot(schedule::make_schedule(schedule, 2), timeout);
}

TEST(ComputeSlot, OneThreadAtATimeComputes) {
  auto slot = slot_with("interleaved");
  slot.begin_step(8);
  std::atomic<int> computing = 0, turns = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      Activity activity(slot, base::Step(0), Microbatch(i), Phase::kStart);
      for (int turn = 0; turn < 100; ++turn) {
        EXPECT_EQ(++computing, 1);
        ++turns;
        --computing;
        activity.without_slot(turn % 2 == 0 ? Phase::kForward : Phase::kBackward, [] { std::this_thread::yield(); });
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(turns, 800);
}

TEST(ComputeSlot, ThreadsThatHandItOnKeepTheirProcessors) {
  const auto mine = [] {
    cpu_set_t processors;
    EXPECT_EQ(::sched_getaffinity(0, sizeof processors, &processors), 0);
    return processors;
  };
  const auto all = mine();
  auto slot = slot_with("simple");
  slot.begin_step(4);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      Activity activity(slot, base::Step(0), Microbatch(i), Phase::kStart);
      for (int turn = 0; turn < 100; ++turn) {
        activity.without_slot(Phase::kForward, [] { std::this_thread::yield(); });
        const auto now = mine();
        EXPECT_TRUE(CPU_EQUAL(&now, &all)) << CPU_COUNT(&now) << " of " << CPU_COUNT(&all);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(ComputeSlot, TellsWhoeverGivesItUpThatNobodyTakesIt) {
  auto slot = slot_with("interleaved");
  slot.begin_step(2);
  int told = 0;
  slot.when_idle([&] { ++told; });
  std::optional<Activity> first(std::in_place, slot, base::Step(0), Microbatch(0), Phase::kForward);
  const auto place = slot.reserve(Phase::kForward, Microbatch(1));
  first.reset();
  EXPECT_EQ(told, 0);
  std::optional<Activity> second(std::in_place, *place, slot, base::Step(0), Microbatch(1), Phase::kForward);
  second->without_slot(Phase::kForward, [&] { EXPECT_EQ(told, 1); });
  second.reset();
  EXPECT_EQ(told, 2);
}

TEST(Activity, WhoseValueHasComeIsNextThoughItsThreadSleepsOn) {
  auto slot = slot_with("simple");
  slot.begin_step(3);
  std::latch gave_way(1), may_wake(1);
  std::vector<int> order;  // guarded by the slot
  Activity* waiting = nullptr;
  std::thread first([&] {
    Activity activity(slot, base::Step(0), Microbatch(0), Phase::kForward);
    waiting = &activity;
    activity.without_slot(Phase::kForward, [&] {
      gave_way.count_down();
      may_wake.wait();
    });
    order.push_back(0);
  });
  gave_way.wait();
  std::optional<Activity> holder(std::in_place, slot, base::Step(0), Microbatch(2), Phase::kForward);
  waiting->take_place();
  std::atomic<bool> asks = false;
  std::thread second([&] {
    asks = true;
    Activity activity(slot, base::Step(0), Microbatch(1), Phase::kForward);
    order.push_back(1);
  });
  while (!asks) std::this_thread::yield();
  holder.reset();
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  may_wake.count_down();
  first.join();
  second.join();
  EXPECT_EQ(order, (std::vector<int>{0, 1}));
}

TEST(ComputeSlot, AThreadHoldsItAgainAfterAWaitThatFailed) {
  auto slot = slot_with("interleaved");
  slot.begin_step(2);
  std::atomic<bool> began = false, ended = false;
  std::thread other;
  {
    Activity activity(slot, base::Step(0), Microbatch(0), Phase::kStart);
    const auto fail = [&] {
      other = std::thread([&] {
        Activity next(slot, base::Step(0), Microbatch(1), Phase::kStart);
        began = true;
        for (int i = 0; i < 1000; ++i) std::this_thread::yield();
        ended = true;
      });
      while (!began) std::this_thread::yield();
      throw base::TimeoutError("no answer");
    };
    EXPECT_THROW(activity.without_slot(Phase::kForward, fail), base::TimeoutError);
    EXPECT_TRUE(ended);
  }
  other.join();
}

TEST(ComputeSlot, CodeThatSwallowsTheEndOfItsStepDoesNotGiveAwayAnothersTurn) {
  auto slot = slot_with("interleaved");
  slot.begin_step(2);
  Activity holder(slot, base::Step(0), Microbatch(0), Phase::kStart);
  std::atomic<bool> waits = false;
  std::thread swallower([&] {
    try {
      Activity never(slot, base::Step(0), Microbatch(1), Phase::kStart);
      FAIL();
    } catch (const base::CancelledError&) {
      waits = true;
    }
  });
  slot.cancel();
  swallower.join();
  EXPECT_TRUE(waits);
  EXPECT_THROW(holder.without_slot(Phase::kForward, [] {}), base::CancelledError);
  EXPECT_THROW(holder.without_slot(Phase::kForward, [] {}), base::CancelledError);  // again: it holds nothing
}

TEST(ComputeSlot, PlacesAreServedInTheirOrderWhicheverThreadComesFirst) {
  auto slot = slot_with("interleaved");
  slot.begin_step(1);
  std::vector<std::shared_ptr<ComputeSlot::Place>> places;
  for (int i = 0; i < 4; ++i) places.push_back(slot.reserve(Phase::kForward, Microbatch(0)));
  std::vector<int> served;  // touched with the slot alone
  std::vector<std::thread> threads;
  for (int i = 3; i >= 0; --i) {
    threads.emplace_back([&, i] {
      Activity activity(*places[i], slot, base::Step(0), Microbatch(0), Phase::kForward);
      served.push_back(i);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(served, (std::vector<int>{0, 1, 2, 3}));
}

TEST(ComputeSlot, APlaceThatNobodyComesForIsGivenBackWhetherItWasGrantedOrNot) {
  auto slot = slot_with("interleaved");
  slot.begin_step(1);
  auto granted = slot.reserve(Phase::kForward, Microbatch(0));
  auto waiting = slot.reserve(Phase::kForward, Microbatch(0));
  auto last = slot.reserve(Phase::kForward, Microbatch(0));
  waiting.reset();
  granted.reset();
  Activity activity(*last, slot, base::Step(0), Microbatch(0), Phase::kForward);  // would wait for ever
}

TEST(ComputeSlot, APlaceOfACancelledStepThrowsWhenItsThreadComesAndLeavesNothingBehind) {
  auto slot = slot_with("interleaved");
  slot.begin_step(1);
  {
    Activity holder(slot, base::Step(0), Microbatch(0), Phase::kForward);
    const auto place = slot.reserve(Phase::kForward, Microbatch(0));
    slot.cancel();
    EXPECT_THROW(Activity(*place, slot, base::Step(0), Microbatch(0), Phase::kForward), base::CancelledError);
  }
  slot.begin_step(1);
  Activity next(slot, base::Step(1), Microbatch(0), Phase::kStart);
}

TEST(ComputeSlot, AfterACancelledStepTheNextOneBeginsAfresh) {
  auto slot = slot_with("simple");
  for (int step = 0; step < 3; ++step) {
    slot.begin_step(1);
    {
      Activity activity(slot, base::Step(step), Microbatch(0), Phase::kStart);
      slot.cancel();
      EXPECT_THROW(activity.without_slot(Phase::kForward, [] {}), base::CancelledError);
    }
  }
}

TEST(ComputeSlot, ATurnThatDoesNotComeIsATimeoutThatNamesTheMicrobatch) {
  auto slot = slot_with("simple", std::chrono::milliseconds(20));
  slot.begin_step(2);
  Activity holder(slot, base::Step(0), Microbatch(0), Phase::kStart);
  std::thread waiter([&] {
    try {
      slot.acquire(Phase::kForward, Microbatch(1));
      ADD_FAILURE();
    } catch (const base::TimeoutError& error) {
      EXPECT_NE(std::string(error.what()).find("turn of microbatch 1"), std::string::npos) << error.what();
    }
  });
  waiter.join();
}

TEST(ComputeSlot, SimpleStartsNoBackwardBeforeTheLastForwardHasEnded) {
  auto slot = slot_with("simple");
  slot.begin_step(3);
  std::atomic<int> forwards = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      Activity activity(slot, base::Step(0), Microbatch(i), Phase::kStart);
      ++forwards;
      activity.end_forward();
      activity.without_slot(Phase::kBackwardStart, [] {});
      EXPECT_EQ(forwards, 3);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Of two threads that wait the schedule takes the backward, also when it is the one that has just computed.
TEST(ComputeSlot, QueuingAgainDoesNotLetThroughWhoComesLaterByTheSchedule) {
  auto slot = slot_with("interleaved");
  slot.begin_step(2);
  std::atomic<bool> waits = false, started = false;
  std::thread next;
  {
    Activity activity(slot, base::Step(0), Microbatch(0), Phase::kStart);
    next = std::thread([&] {
      waits = true;
      Activity other(slot, base::Step(0), Microbatch(1), Phase::kStart);
      started = true;
    });
    while (!waits) std::this_thread::yield();
    for (int turn = 0; turn < 200; ++turn) {
      std::this_thread::yield();
      activity.queue_again(Phase::kBackwardStart);
      EXPECT_FALSE(started) << "turn " << turn;
    }
  }
  next.join();
  EXPECT_TRUE(started);
}

// Release builds check nothing; there the death test only runs the wait.
TEST(ComputeSlotDeathTest, ADebugBuildEndsWhoeverWaitsHoldingTheInterpretersLock) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  bool holds = false;
  ComputeSlot slot(schedule::make_schedule("simple", 2), std::chrono::seconds(30), [&] { return holds; });
  slot.begin_step(2);
  Activity activity(slot, base::Step(0), Microbatch(0), Phase::kStart);
  holds = true;
  EXPECT_DEBUG_DEATH(activity.without_slot(Phase::kForward, [&] { holds = false; }), "holding the GIL");
  holds = true;
  EXPECT_DEBUG_DEATH(activity.queue_again(Phase::kForward), "holding the GIL");
}

TEST(Activity, IsThatOfItsThreadAndOfNoOther) {
  auto slot = slot_with("simple");
  slot.begin_step(1);
  EXPECT_EQ(Activity::current(), nullptr);
  {
    Activity activity(slot, base::Step(3), Microbatch(0), Phase::kStart);
    EXPECT_EQ(Activity::current(), &activity);
    std::thread([] { EXPECT_EQ(Activity::current(), nullptr); }).join();
  }
  EXPECT_EQ(Activity::current(), nullptr);
}

}  // namespace
}  // namespace lamina::runtime
