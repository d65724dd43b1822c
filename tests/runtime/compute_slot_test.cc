// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/compute_slot.h"

#include <gtest/gtest.h>

#include <atomic>
#include <latch>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/runtime/execution_context.h"

namespace lamina::runtime {
namespace {

using base::Microbatch;
using schedule::Phase;

// A step of `microbatches`, without a job.
class Alone {
 public:
  Alone(const char* schedule, int microbatches, std::chrono::milliseconds timeout = std::chrono::seconds(30),
        WorkerPool::Hooks hooks = {})
      : pool_(std::move(hooks)),
        step(pool_, {.microbatches = microbatches,
                     .turns = schedule::TeamTurns::alone(schedule::make_schedule(schedule, 2)),
                     .timeout = timeout}),
        slot(step.slot()) {}

 private:
  WorkerPool pool_;

 public:
  StepContext step;
  ComputeSlot& slot;
};

TEST(ComputeSlot, OneThreadAtATimeComputes) {
  Alone alone("interleaved", 8);
  auto& step = alone.step;
  std::atomic<int> computing = 0, turns = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      ExecutionContext context(step, Microbatch(i), Phase::kStart);
      for (int turn = 0; turn < 100; ++turn) {
        EXPECT_EQ(++computing, 1);
        ++turns;
        --computing;
        context.without_slot(turn % 2 == 0 ? Phase::kForward : Phase::kBackward, [] { std::this_thread::yield(); });
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
  Alone alone("simple", 4);
  auto& step = alone.step;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      ExecutionContext context(step, Microbatch(i), Phase::kStart);
      for (int turn = 0; turn < 100; ++turn) {
        context.without_slot(Phase::kForward, [] { std::this_thread::yield(); });
        const auto now = mine();
        EXPECT_TRUE(CPU_EQUAL(&now, &all)) << CPU_COUNT(&now) << " of " << CPU_COUNT(&all);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(ComputeSlot, TellsWhoeverGivesItUpThatNobodyTakesIt) {
  Alone alone("interleaved", 2);
  auto& step = alone.step;
  auto& slot = alone.slot;
  int told = 0;
  slot.when_idle([&] { ++told; });
  std::optional<ExecutionContext> first(std::in_place, step, Microbatch(0), Phase::kForward);
  const auto place = slot.reserve(Phase::kForward, {Microbatch(1)});
  first.reset();
  EXPECT_EQ(told, 0);
  std::optional<ExecutionContext> second(std::in_place, step, *place, schedule::TurnName{Microbatch(1)},
                                         Phase::kForward);
  second->without_slot(Phase::kForward, [&] { EXPECT_EQ(told, 1); });
  second.reset();
  EXPECT_EQ(told, 2);
}

TEST(ComputeSlot, CallsWorkWithoutAThreadWhenItsTurnComes) {
  Alone alone("simple", 3);
  auto& slot = alone.slot;
  std::vector<int> order;
  const auto reserve = [&](int microbatch) {
    slot.reserve(Phase::kForward, Microbatch(microbatch), [&, microbatch] { order.push_back(microbatch); });
  };
  reserve(2);
  EXPECT_EQ(order, std::vector{2});  // at once, for the slot is free
  reserve(1);
  reserve(0);
  EXPECT_EQ(order, std::vector{2});
  slot.release();
  slot.release();
  EXPECT_EQ(order, (std::vector{2, 0, 1}));
}

TEST(ComputeSlot, CallsWorkWithoutItsLock) {
  Alone alone("simple", 1);
  auto& slot = alone.slot;
  bool called = false;
  slot.reserve(Phase::kForward, Microbatch(0), [&] {
    slot.reserve(Phase::kForward, Microbatch(1), [&] { called = true; });
    slot.release();
  });
  EXPECT_TRUE(called);
}

TEST(ComputeSlot, DropsWorkWithoutAThreadOnceItIsCancelled) {
  Alone alone("simple", 1);
  auto& slot = alone.slot;
  const auto kept = std::make_shared<int>(0);
  slot.reserve(Phase::kForward, Microbatch(0), [] {});
  slot.reserve(Phase::kForward, Microbatch(1), [kept] { FAIL() << "was called"; });
  slot.cancel();
  EXPECT_EQ(kept.use_count(), 1);
  slot.reserve(Phase::kForward, Microbatch(2), [kept] { FAIL() << "was called"; });
  EXPECT_EQ(kept.use_count(), 1);
  slot.release();
}

TEST(ExecutionContext, WhoseValueHasComeIsNextThoughItsThreadSleepsOn) {
  Alone alone("simple", 3);
  auto& step = alone.step;
  std::latch gave_way(1), may_wake(1);
  std::vector<int> order;  // guarded by the slot
  ExecutionContext* waiting = nullptr;
  std::thread first([&] {
    ExecutionContext context(step, Microbatch(0), Phase::kForward);
    waiting = &context;
    context.without_slot(Phase::kForward, [&] {
      gave_way.count_down();
      may_wake.wait();
    });
    order.push_back(0);
  });
  gave_way.wait();
  std::optional<ExecutionContext> holder(std::in_place, step, Microbatch(2), Phase::kForward);
  waiting->take_place();
  std::atomic<bool> asks = false;
  std::thread second([&] {
    asks = true;
    ExecutionContext context(step, Microbatch(1), Phase::kForward);
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
  Alone alone("interleaved", 2);
  auto& step = alone.step;
  std::atomic<bool> began = false, ended = false;
  std::thread other;
  {
    ExecutionContext context(step, Microbatch(0), Phase::kStart);
    const auto fail = [&] {
      other = std::thread([&] {
        ExecutionContext next(step, Microbatch(1), Phase::kStart);
        began = true;
        for (int i = 0; i < 1000; ++i) std::this_thread::yield();
        ended = true;
      });
      while (!began) std::this_thread::yield();
      throw base::TimeoutError("no answer");
    };
    EXPECT_THROW(context.without_slot(Phase::kForward, fail), base::TimeoutError);
    EXPECT_TRUE(ended);
  }
  other.join();
}

TEST(ComputeSlot, CodeThatSwallowsTheEndOfItsStepDoesNotGiveAwayAnothersTurn) {
  Alone alone("interleaved", 2);
  auto& step = alone.step;
  auto& slot = alone.slot;
  ExecutionContext holder(step, Microbatch(0), Phase::kStart);
  std::atomic<bool> waits = false;
  std::thread swallower([&] {
    try {
      ExecutionContext never(step, Microbatch(1), Phase::kStart);
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
  Alone alone("interleaved", 1);
  auto& step = alone.step;
  auto& slot = alone.slot;
  std::vector<std::shared_ptr<ComputeSlot::Place>> places;
  for (int i = 0; i < 4; ++i) places.push_back(slot.reserve(Phase::kForward, {Microbatch(0)}));
  std::vector<int> served;  // touched with the slot alone
  std::vector<std::thread> threads;
  for (int i = 3; i >= 0; --i) {
    threads.emplace_back([&, i] {
      ExecutionContext context(step, *places[i], {Microbatch(0)}, Phase::kForward);
      served.push_back(i);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(served, (std::vector<int>{0, 1, 2, 3}));
}

TEST(ComputeSlot, APlaceThatNobodyComesForIsGivenBackWhetherItWasGrantedOrNot) {
  Alone alone("interleaved", 1);
  auto& step = alone.step;
  auto& slot = alone.slot;
  auto granted = slot.reserve(Phase::kForward, {Microbatch(0)});
  auto waiting = slot.reserve(Phase::kForward, {Microbatch(0)});
  auto last = slot.reserve(Phase::kForward, {Microbatch(0)});
  waiting.reset();
  granted.reset();
  ExecutionContext context(step, *last, {Microbatch(0)}, Phase::kForward);  // would wait for ever
}

TEST(ComputeSlot, APlaceOfACancelledStepThrowsWhenItsThreadComes) {
  Alone alone("interleaved", 1);
  ExecutionContext holder(alone.step, Microbatch(0), Phase::kForward);
  const auto place = alone.slot.reserve(Phase::kForward, {Microbatch(0)});
  alone.slot.cancel();
  EXPECT_THROW(ExecutionContext(alone.step, *place, {Microbatch(0)}, Phase::kForward), base::CancelledError);
}

TEST(ComputeSlot, ATurnThatDoesNotComeIsATimeoutThatNamesTheMicrobatch) {
  Alone alone("simple", 2, std::chrono::milliseconds(20));
  auto& step = alone.step;
  auto& slot = alone.slot;
  ExecutionContext holder(step, Microbatch(0), Phase::kStart);
  std::thread waiter([&] {
    try {
      slot.acquire(Phase::kForward, {Microbatch(1)});
      ADD_FAILURE();
    } catch (const base::TimeoutError& error) {
      EXPECT_NE(std::string(error.what()).find("turn of microbatch 1"), std::string::npos) << error.what();
    }
  });
  waiter.join();
}

TEST(ComputeSlot, SimpleStartsNoBackwardBeforeTheLastForwardHasEnded) {
  Alone alone("simple", 3);
  auto& step = alone.step;
  std::atomic<int> forwards = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      ExecutionContext context(step, Microbatch(i), Phase::kStart);
      ++forwards;
      context.end_forward();
      context.without_slot(Phase::kBackwardStart, [] {});
      EXPECT_EQ(forwards, 3);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Among two threads that wait the schedule takes the backward, also when it is the one that has just computed.
TEST(ComputeSlot, QueuingAgainDoesNotLetThroughWhoComesLaterByTheSchedule) {
  Alone alone("interleaved", 2);
  auto& step = alone.step;
  std::atomic<bool> waits = false, started = false;
  std::thread next;
  {
    ExecutionContext context(step, Microbatch(0), Phase::kStart);
    next = std::thread([&] {
      waits = true;
      ExecutionContext other(step, Microbatch(1), Phase::kStart);
      started = true;
    });
    while (!waits) std::this_thread::yield();
    for (int turn = 0; turn < 200; ++turn) {
      std::this_thread::yield();
      context.queue_again(Phase::kBackwardStart);
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
  Alone alone("simple", 2, std::chrono::seconds(30), {.holds_interpreter_lock = [&] { return holds; }});
  auto& step = alone.step;
  ExecutionContext context(step, Microbatch(0), Phase::kStart);
  holds = true;
  EXPECT_DEBUG_DEATH(context.without_slot(Phase::kForward, [&] { holds = false; }), "holding the GIL");
  holds = true;
  EXPECT_DEBUG_DEATH(context.queue_again(Phase::kForward), "holding the GIL");
}

TEST(ExecutionContext, IsThatOfItsThreadAndOfNoOther) {
  Alone alone("simple", 1);
  auto& step = alone.step;
  EXPECT_EQ(ExecutionContext::current(), nullptr);
  {
    ExecutionContext context(step, Microbatch(0), Phase::kStart);
    EXPECT_EQ(ExecutionContext::current(), &context);
    std::thread([] { EXPECT_EQ(ExecutionContext::current(), nullptr); }).join();
  }
  EXPECT_EQ(ExecutionContext::current(), nullptr);
}

}  // namespace
}  // namespace lamina::runtime
