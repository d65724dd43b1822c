// SPDX-License-Identifier: Apache-2.0
// The steps of a rank and the threads that work on them; without torch's operations and without messages between ranks.
#include "lamina/remote/steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/schedule/schedule.h"
#include "tests/runtime/threads.h"

namespace lamina::remote {
namespace {

using runtime::Gate;
using runtime::kPatience;

class Step : public ::testing::Test {
 protected:
  void TearDown() override { steps_.wait_idle(kPatience); }  // as a job does before it goes

  static transport::Message end_of_step(std::int64_t step) {
    transport::Message message;
    message.call.step = base::Step(step);
    return message;
  }
  class Counted : public StepScope {
   public:
    Counted(runtime::WorkerPool& pool, Options options, std::atomic<int>& cancels)
        : StepScope(pool, std::move(options)), cancels_(cancels) {}
    void cancel() override { ++cancels_; }

   private:
    std::atomic<int>& cancels_;
  };

  std::shared_ptr<StepScope> begin(bool leads = true) {
    const auto make = [&](base::Step number) {
      runtime::StepContext::Options options{
          .number = number, .turns = schedule::TeamTurns::alone(schedule::make_schedule("interleaved", 1))};
      return std::make_shared<Counted>(pool_, std::move(options), cancels_);
    };
    return step_ = steps_.begin(make, {}, leads);
  }
  // A message that has work done in its step.
  void request(std::int64_t step, const std::function<void()>& work) {
    steps_.deliver(end_of_step(step), [work](StepScope& scope, transport::Message&&) { scope.serve(work); });
  }
  void lose(base::Rank rank, const std::string& why) {
    steps_.fail_for_good(std::make_exception_ptr(base::PeerError(base::Loss{rank, why, ""}.text())));
  }
  std::optional<transport::Message> wait_end(
      const base::Patience& patience = kPatience, const std::function<bool()>& done = [] { return false; }) {
    step_->wait_end(patience, base::Rank(0), done);
    return step_->error() ? std::nullopt : steps_.take_end();
  }
  // The error that the step ended with.
  std::string end() {
    step_->wait_idle(kPatience);
    const auto error = step_->error();
    steps_.end();
    step_->close();
    if (!error) return "";
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& caught) {
      return caught.what();
    }
  }

  runtime::WorkerPool pool_{{}};
  std::atomic<int> cancels_ = 0;
  Steps steps_{base::Rank(1)};
  std::shared_ptr<StepScope> step_;
};

TEST_F(Step, AreCounted) {
  EXPECT_EQ(begin()->number(), base::Step(0));
  EXPECT_EQ(end(), "");
  EXPECT_EQ(begin()->number(), base::Step(1));
}

TEST_F(Step, TheFirstErrorEndsItAndIsToldOnce) {
  begin();
  step_->fail(std::make_exception_ptr(std::runtime_error("first")));
  step_->run([] { throw std::runtime_error("second"); });
  EXPECT_EQ(wait_end(), std::nullopt);
  EXPECT_EQ(end(), "first");
  EXPECT_EQ(cancels_, 1);
}

TEST_F(Step, AnErrorOfAnEarlierStepIsNotItsOwn) {
  const auto first = begin();
  EXPECT_EQ(end(), "");
  begin();
  first->fail(std::make_exception_ptr(std::runtime_error("late")));
  EXPECT_EQ(end(), "");
}

TEST_F(Step, InsideAStepIsAUsageError) {
  begin();
  EXPECT_THROW(begin(), base::UsageError);
}

TEST_F(Step, RequestsThatCameEarlyAreServedAndLateOnesDropped) {
  std::atomic<int> served = 0;
  const auto serve = [&] { ++served; };
  request(0, serve);
  request(1, serve);
  request(1, serve);
  EXPECT_EQ(served, 0);
  begin();
  EXPECT_EQ(end(), "");
  EXPECT_EQ(served, 1);
  request(0, serve);
  begin();
  request(0, serve);
  EXPECT_EQ(end(), "");
  EXPECT_EQ(served, 3);
}

// A step that begins while messages of it, and of the next one, come.
TEST_F(Step, GetsItsMessagesInTheirOrderWheneverItBegins) {
  constexpr int kSteps = 50, kMessages = 40;
  std::mutex mutex;
  std::map<base::Step, std::vector<int>> got;
  std::thread transport([&] {
    for (int i = 0; i < kSteps * kMessages; ++i) {
      steps_.deliver(end_of_step(i / kMessages), [&, i](StepScope& scope, transport::Message&&) {
        std::lock_guard guard(mutex);
        got[scope.number()].push_back(i % kMessages);
      });
    }
  });
  for (int step = 0; step < kSteps; ++step) {
    begin();
    const auto all_came = [&] {
      std::lock_guard guard(mutex);
      return static_cast<int>(got[base::Step(step)].size()) == kMessages;
    };
    const auto deadline = base::Deadline::after(std::chrono::seconds(30));
    while (!all_came() && !deadline.expired()) std::this_thread::yield();
    EXPECT_EQ(end(), "");
  }
  transport.join();
  for (const auto& [step, numbers] : got) {
    EXPECT_EQ(numbers.size(), kMessages) << "step " << step;
    EXPECT_TRUE(std::ranges::is_sorted(numbers)) << "step " << step;
  }
}

TEST_F(Step, AnEndThatCameEarlyIsFoundAndALateOneDropped) {
  steps_.receive_end(end_of_step(1));
  begin();
  EXPECT_EQ(end(), "");
  steps_.receive_end(end_of_step(0));
  begin();
  EXPECT_EQ(wait_end()->call.step, base::Step(1));
}

// The leading rank may have begun the next one, which has the number of the one that was retracted.
TEST_F(Step, HearsWhichMicrobatchesAreSplitBeforeAnythingElse) {
  const auto step = begin(/*leads=*/false);
  EXPECT_FALSE(step->splits(base::Microbatch(3)));
  std::vector<bool> splits;
  steps_.deliver(end_of_step(0), [&](StepScope& scope, transport::Message&&) {
    for (const int microbatch : {2, 3}) splits.push_back(scope.splits(base::Microbatch(microbatch)));
  });
  EXPECT_TRUE(splits.empty());
  steps_.announce(base::Step(0), {base::Rank(0), {}, 3});
  EXPECT_EQ(splits, (std::vector<bool>{false, true}));
  EXPECT_EQ(end(), "");
}

TEST_F(Step, ThatWasRetractedDoesNotEndWithTheNextOne) {
  begin(/*leads=*/false);
  steps_.retract();
  steps_.announce(base::Step(0), {base::Rank(0), {}});
  steps_.receive_end(end_of_step(0));
  const base::Patience moment{std::chrono::milliseconds(100), [] {}};
  EXPECT_THROW(wait_end(moment, [] { return false; }), base::TimeoutError);
  EXPECT_EQ(end(), "");
  EXPECT_EQ(begin(/*leads=*/false)->number(), base::Step(0));
  EXPECT_TRUE(wait_end());
  EXPECT_EQ(end(), "");
}

TEST_F(Step, ALostRankEndsItAndEveryLaterOne) {
  begin();
  lose(base::Rank(7), "its process ended");
  EXPECT_NE(end().find("rank 7 is lost: its process ended"), std::string::npos);
  begin();
  EXPECT_NE(end().find("is lost"), std::string::npos);
}

TEST_F(Step, AThreadThatMeetsALostRankIsNotTheFirstCauseWhereTheEndIsOnItsWay) {
  begin();
  Gate met;
  step_->run([&] {
    met.open();
    throw base::PeerError("rank 2 is lost: it called shutdown");
  });
  met.wait();
  steps_.receive_end(end_of_step(0));
  EXPECT_TRUE(wait_end().has_value());
  EXPECT_EQ(end(), "");
  EXPECT_EQ(cancels_, 0);
}

TEST_F(Step, AThreadThatMeetsALostRankEndsItWhereNobodySaysMore) {
  begin();
  step_->run([] { throw base::PeerError("rank 2 is lost: it called shutdown"); });
  EXPECT_EQ(wait_end(), std::nullopt);
  EXPECT_EQ(end(), "rank 2 is lost: it called shutdown");
}

TEST_F(Step, WhoseEndWasAnnouncedOutlivesTheRankThatAnnouncedIt) {
  begin();
  steps_.receive_end(end_of_step(0));
  steps_.receive_end(end_of_step(1));  // of the next step, which nothing of this rank is needed for
  lose(base::Rank(0), "it called shutdown");
  EXPECT_TRUE(wait_end().has_value());
  EXPECT_EQ(end(), "");
  begin();
  EXPECT_EQ(end(), "");
  begin();
  EXPECT_NE(end().find("is lost"), std::string::npos);
}

TEST_F(Step, WhoseEndComesWhileItCatchesUpOutlivesTheRankThatAnnouncedIt) {
  steps_.deliver(end_of_step(0), [&](StepScope&, transport::Message&&) {
    steps_.receive_end(end_of_step(0));
    lose(base::Rank(0), "it called shutdown");
  });
  begin();
  EXPECT_TRUE(wait_end().has_value());
  EXPECT_EQ(end(), "");
}

TEST_F(Step, ThatIsDoneOutlivesTheRanksThatLeaveAfterIt) {
  begin();
  EXPECT_FALSE(wait_end(kPatience, [] { return true; }).has_value());
  lose(base::Rank(1), "it called shutdown");
  EXPECT_EQ(end(), "");
  begin();
  EXPECT_NE(end().find("is lost"), std::string::npos);
}

TEST_F(Step, InWhichNothingHappensIsATimeout) {
  begin();
  EXPECT_THROW(wait_end({std::chrono::milliseconds(60), [] {}}, [] { return false; }), base::TimeoutError);
}

TEST_F(Step, InWhichAThreadWorksIsNoTimeout) {
  begin();
  Gate gate;
  int checks = 0;
  step_->run([&] { gate.wait(); });
  const auto check = [&] {
    if (++checks == 4) gate.open();  // long after the patience
  };
  EXPECT_NO_THROW(wait_end({std::chrono::milliseconds(60), check}, [&] { return checks >= 4; }));
  EXPECT_EQ(end(), "");  // the thread is out of the gate
}

TEST_F(Step, WithoutThreadsARequestEndsItAndNothingEscapes) {
  begin();
  no_more_threads = true;
  EXPECT_NO_THROW(request(0, [] {}));
  no_more_threads = false;
  EXPECT_NE(end(), "");
  request(1, [] {});
  no_more_threads = true;
  EXPECT_NO_THROW(begin());
  no_more_threads = false;
  EXPECT_NE(end(), "");
  begin();
  EXPECT_EQ(end(), "");
}

}  // namespace
}  // namespace lamina::remote
