// SPDX-License-Identifier: Apache-2.0
// Threads and the step they work on; without torch's operations and without messages between ranks.
#include "lamina/runtime/step_state.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <system_error>

#include "lamina/base/error.h"

namespace {
std::atomic<bool> no_more_threads = false;
}  // namespace

// Stands before the C library's: a test may say that the system has no thread to give.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                              void* argument) {
  if (no_more_threads) return EAGAIN;
  static const auto real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  return real(thread, attributes, run, argument);
}

namespace lamina::runtime {
namespace {

const base::Patience kPatience{std::chrono::seconds(30), [] {}};
const std::function<void(base::Step)> kNothing = [](base::Step) {};

// A latch that a test opens.
class Gate {
 public:
  void open() {
    std::lock_guard guard(mutex_);
    open_ = true;
    changed_.notify_all();  // under the lock: whoever waits may destroy this
  }
  void wait() {
    std::unique_lock lock(mutex_);
    base::wait_until(lock, changed_, kPatience, [&] { return open_; }, [] { return "gate"; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

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

class Step : public ::testing::Test {
 protected:
  void TearDown() override { state_.wait_idle(kPatience); }  // as a job does before it goes

  static transport::Message end_of_step(std::int64_t step) {
    transport::Message message;
    message.call.step = base::Step(step);
    return message;
  }
  // What the step ended with.
  std::string end() {
    state_.wait_idle(kPatience);
    const auto error = state_.error();
    state_.end();
    if (!error) return "";
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& caught) {
      return caught.what();
    }
  }

  WorkerPool pool_{{}};
  std::atomic<int> errors_ = 0;
  StepState state_{pool_, [this] { ++errors_; }};
};

TEST_F(Step, AreCounted) {
  EXPECT_EQ(state_.begin(kNothing), base::Step(0));
  EXPECT_EQ(end(), "");
  EXPECT_EQ(state_.begin(kNothing), base::Step(1));
}

TEST_F(Step, TheFirstErrorEndsItAndIsToldOnce) {
  state_.begin(kNothing);
  state_.fail(base::Step(0), std::make_exception_ptr(std::runtime_error("first")));
  state_.run([] { throw std::runtime_error("second"); });
  EXPECT_EQ(state_.wait_end(kPatience, base::Rank(0), [] { return false; }), std::nullopt);
  EXPECT_EQ(end(), "first");
  EXPECT_EQ(errors_, 1);
}

TEST_F(Step, AnErrorOfAnEarlierStepIsNotItsOwn) {
  state_.begin(kNothing);
  EXPECT_EQ(end(), "");
  state_.begin(kNothing);
  state_.fail(base::Step(0), std::make_exception_ptr(std::runtime_error("late")));
  EXPECT_EQ(end(), "");
}

TEST_F(Step, InsideAStepIsAUsageError) {
  state_.begin(kNothing);
  EXPECT_THROW(state_.begin(kNothing), base::UsageError);
}

TEST_F(Step, RequestsThatCameEarlyAreServedAndLateOnesDropped) {
  std::atomic<int> served = 0;
  const auto serve = [&] { ++served; };
  state_.run(base::Step(0), [&] { return serve; });
  state_.run(base::Step(1), [&] { return serve; });
  state_.run(base::Step(1), [&] { return serve; });
  EXPECT_EQ(served, 0);
  state_.begin(kNothing);
  EXPECT_EQ(end(), "");
  EXPECT_EQ(served, 1);
  state_.run(base::Step(0), [&] { return serve; });
  state_.begin(kNothing);
  state_.run(base::Step(0), [&] { return serve; });
  EXPECT_EQ(end(), "");
  EXPECT_EQ(served, 3);
}

TEST_F(Step, AnEndThatCameEarlyIsFoundAndALateOneDropped) {
  state_.receive_end(end_of_step(1));
  state_.begin(kNothing);
  EXPECT_EQ(end(), "");
  state_.receive_end(end_of_step(0));
  state_.begin(kNothing);
  EXPECT_EQ(state_.wait_end(kPatience, base::Rank(0), [] { return false; })->call.step, base::Step(1));
}

// The leading rank may have begun the next one, which has the number of the one that was retracted.
TEST_F(Step, ThatWasRetractedDoesNotEndWithTheNextOne) {
  state_.begin(kNothing, {}, /*leads=*/false);
  state_.retract();
  state_.receive_begin(base::Step(0), base::Rank(0), {});
  state_.receive_end(end_of_step(0));
  const base::Patience moment{std::chrono::milliseconds(100), [] {}};
  EXPECT_THROW(state_.wait_end(moment, base::Rank(0), [] { return false; }), base::TimeoutError);
  EXPECT_EQ(end(), "");
  EXPECT_EQ(state_.begin(kNothing, {}, /*leads=*/false), base::Step(0));
  EXPECT_TRUE(state_.wait_end(kPatience, base::Rank(0), [] { return false; }));
  EXPECT_EQ(end(), "");
}

TEST_F(Step, ALostRankEndsItAndEveryLaterOne) {
  state_.begin(kNothing);
  state_.lose({base::Rank(7), "its process ended", ""});
  EXPECT_NE(end().find("rank 7 is lost: its process ended"), std::string::npos);
  state_.begin(kNothing);
  EXPECT_NE(end().find("is lost"), std::string::npos);
}

TEST_F(Step, AThreadThatMeetsALostRankIsNotTheFirstCauseWhereTheEndIsOnItsWay) {
  state_.begin(kNothing);
  Gate met;
  state_.run([&] {
    met.open();
    throw base::PeerError("rank 2 is lost: it called shutdown");
  });
  met.wait();
  state_.receive_end(end_of_step(0));
  EXPECT_TRUE(state_.wait_end(kPatience, base::Rank(0), [] { return false; }).has_value());
  EXPECT_EQ(end(), "");
  EXPECT_EQ(errors_, 0);
}

TEST_F(Step, AThreadThatMeetsALostRankEndsItWhereNobodySaysMore) {
  state_.begin(kNothing);
  state_.run([] { throw base::PeerError("rank 2 is lost: it called shutdown"); });
  EXPECT_EQ(state_.wait_end(kPatience, base::Rank(0), [] { return false; }), std::nullopt);
  EXPECT_EQ(end(), "rank 2 is lost: it called shutdown");
}

TEST_F(Step, WhoseEndWasAnnouncedOutlivesTheRankThatAnnouncedIt) {
  state_.begin(kNothing);
  state_.receive_end(end_of_step(0));
  state_.receive_end(end_of_step(1));  // of the next step, which nothing of this rank is needed for
  state_.lose({base::Rank(0), "it called shutdown", ""});
  EXPECT_TRUE(state_.wait_end(kPatience, base::Rank(0), [] { return false; }).has_value());
  EXPECT_EQ(end(), "");
  state_.begin(kNothing);
  EXPECT_EQ(end(), "");
  state_.begin(kNothing);
  EXPECT_NE(end().find("is lost"), std::string::npos);
}

TEST_F(Step, ThatIsDoneOutlivesTheRanksThatLeaveAfterIt) {
  state_.begin(kNothing);
  EXPECT_FALSE(state_.wait_end(kPatience, base::Rank(0), [] { return true; }).has_value());
  state_.lose({base::Rank(1), "it called shutdown", ""});
  EXPECT_EQ(end(), "");
  state_.begin(kNothing);
  EXPECT_NE(end().find("is lost"), std::string::npos);
}

TEST_F(Step, InWhichNothingHappensIsATimeout) {
  state_.begin(kNothing);
  EXPECT_THROW(state_.wait_end({std::chrono::milliseconds(60), [] {}}, base::Rank(0), [] { return false; }),
               base::TimeoutError);
}

TEST_F(Step, InWhichAThreadWorksIsNoTimeout) {
  state_.begin(kNothing);
  Gate gate;
  int checks = 0;
  state_.run([&] { gate.wait(); });
  const auto check = [&] {
    if (++checks == 4) gate.open();  // long after the patience
  };
  EXPECT_NO_THROW(state_.wait_end({std::chrono::milliseconds(60), check}, base::Rank(0), [&] { return checks >= 4; }));
  EXPECT_EQ(end(), "");  // the thread is out of the gate
}

TEST_F(Step, WithoutThreadsARequestEndsItAndNothingEscapes) {
  state_.begin(kNothing);
  no_more_threads = true;
  EXPECT_NO_THROW(state_.run(base::Step(0), [] { return [] {}; }));
  no_more_threads = false;
  EXPECT_NE(end(), "");
  state_.run(base::Step(1), [] { return [] {}; });
  no_more_threads = true;
  EXPECT_NO_THROW(state_.begin(kNothing));
  no_more_threads = false;
  EXPECT_NE(end(), "");
  state_.begin(kNothing);
  EXPECT_EQ(end(), "");
}

}  // namespace
}  // namespace lamina::runtime
