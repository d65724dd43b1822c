// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "lamina/base/error.h"
#include "tests/collective/job_ranks.h"

namespace lamina::collective {
namespace {

using namespace std::chrono_literals;
using test::expect_error;
using test::in_job;
using test::JobRank;
using test::wait_alone;
using topology::Group;
using Clock = std::chrono::steady_clock;
using Start = std::function<Started(JobRank&, collective::Group&)>;

// The last rank starts and is killed while 64 MiB are on their way. A rank that begins later than that hears of the
// loss as it begins.
void lose_the_last(int size, const Start& start) {
  const auto body = [&](JobRank& job) {
    auto& group = job.group();
    job.meet();
    auto begin = Clock::now();
    try {
      const auto started = start(job, group);
      if (job.rank() == job.size() - 1) ::kill(::getpid(), SIGKILL);
      begin = Clock::now();
      started->wait();
      ADD_FAILURE() << "it ended well";
    } catch (const base::PeerError& error) {
      EXPECT_LE(Clock::now() - begin, 2s);
      EXPECT_THAT(error.what(), ::testing::StartsWith("testing over rank"));
      ASSERT_TRUE(error.loss()) << error.what();
      EXPECT_EQ(error.loss()->rank.value, job.size() - 1);
    }
  };
  in_job(size, body, {}, {size - 1});
}

at::Tensor large() { return at::ones({std::int64_t{16} << 20}); }

TEST(Waits, APeerKilledInTheMiddleOfAnAllReduceIsNamedWithin2s) {
  const auto reduce = [](JobRank& job, auto& group) {
    return group.all_reduce(large(), Reduction::kSum, job.call_options());
  };
  for (const int size : {2, 4}) lose_the_last(size, reduce);
}

TEST(Waits, APeerKilledInTheMiddleOfAnExchangeIsNamedWithin2s) {
  lose_the_last(2, [](JobRank& job, auto& group) {
    return group.all_to_all(at::empty_like(large()), large(), job.call_options());
  });
}

TEST(Waits, APeerKilledBeforeItSendsIsNamedWithin2s) {
  lose_the_last(2, [](JobRank& job, auto& group) {
    return group.receive(at::empty({10}), (job.rank() + 1) % 2, job.call_options());
  });
}

TEST(Waits, ADeadlineSaysWhoDidNotCome) {
  wait_alone([](JobRank& job, auto& group) {
    const auto begin = Clock::now();
    const CallOptions call_options{"averaging gradients", job.patience(1s)};
    expect_error<base::TimeoutError>(
        [&] { group.all_reduce(at::ones({2}), Reduction::kSum, call_options)->wait(); },
        "averaging gradients over ranks 0, 1 without rank 1, which has not come: no answer for 1 s");
    EXPECT_LE(Clock::now() - begin, 2s);
    EXPECT_EQ(group.stuck(), job.gloo);  // which cannot give a collective up
  });
}

TEST(Waits, ADeadlineOfAReceiveDoesSo) {
  wait_alone([](JobRank& job, auto& group) {
    const auto receive = group.receive(at::empty({1}), 1, {"receiving activations", job.patience(500ms)});
    EXPECT_FALSE(receive->done());
    expect_error<base::TimeoutError>([&] { receive->wait(); },
                                     "receiving activations over ranks 0, 1 without rank 1, which has not come");
  });
}

// Rank 0 waits for rank 1, and rank 1 in another group for rank 3, which does nothing.
TEST(Waits, ADeadlineNamesTheRankThatKeepsAMemberFromComing) {
  int ended[2];
  ASSERT_EQ(::pipe(ended), 0);
  const auto body = [&](JobRank& job) {
    auto& pipeline = job.group(Group::kPp);
    auto& copies = job.group(Group::kRdp);
    char byte = 'x';
    job.meet();
    if (job.rank() > 1) {
      ASSERT_EQ(::read(ended[0], &byte, 1), 1);
      return;
    }
    const CallOptions call_options{"testing", job.patience(job.rank() == 0 ? 1200ms : 1800ms)};
    expect_error<base::TimeoutError>(
        [&] { (job.rank() == 0 ? pipeline : copies).all_reduce(at::ones({2}), Reduction::kSum, call_options)->wait(); },
        job.rank() == 0 ? "without rank 1, which has not come; rank 1 waits for what comes from rank 3: no answer"
                        : "without rank 3, which has not come: no answer");
    if (job.rank() == 1) ASSERT_EQ(::write(ended[1], "xx", 2), 2);  // to ranks 2 and 3
  };
  in_job(4, body, test::with_partitions(2));
}

TEST(Waits, AnInterruptEndsAWait) {
  wait_alone([](JobRank& job, auto& group) {
    auto call_options = job.call_options();
    call_options.patience.check_interrupt = [] { throw std::runtime_error("interrupted"); };
    const auto begin = Clock::now();
    expect_error<std::runtime_error>([&] { group.all_reduce(at::ones({2}), Reduction::kSum, call_options)->wait(); },
                                     "interrupted");
    EXPECT_LE(Clock::now() - begin, 1s);
  });
}

TEST(Waits, RanksThatWaitForEachOtherInDifferentCallsAreTold) {
  in_job(2, [](JobRank& job) {
    auto& group = job.group();
    const auto wait = [&] {
      if (job.rank() == 1) return job.meet();
      auto sum = at::ones({2});
      group.all_reduce(sum, Reduction::kSum, job.call_options())->wait();
    };
    expect_error<base::DesyncError>(wait,
                                    "not on one alone, as under `if rank() == 0`; copies of the model with different");
  });
}

TEST(Waits, CollectivesForDifferentPurposesAreNotMixedUp) {
  for (const int elements : {2, 3}) {
    in_job(2, [&](JobRank& job) {
      if (job.gloo) return;  // which cannot give a collective up, so that its group's end would wait for it
      auto& group = job.group();
      const auto reduce = [&] {
        auto sum = at::ones({job.rank() == 0 ? 2 : elements});
        group.all_reduce(sum, Reduction::kSum, job.call_options(job.rank() == 0 ? "saving" : "updating"))->wait();
      };
      expect_error<base::DesyncError>(reduce, "; rank 1 is in updating [step-calls-differ]");
    });
  }
}

// The first microbatch waits in a collective to which nobody comes, without the slot; then the second one fails.
TEST(Waits, TheEndOfAStepEndsThoseOfItsThreads) {
  auto config = test::with_partitions(1);
  config.active_microbatches = 2;
  const auto body = [](JobRank& job) {
    auto& group = job.group();
    if (job.rank() == 0) {
      std::atomic<bool> cancelled = false;
      const auto microbatch = [&](base::Microbatch number) -> value::Value {
        if (number.value == 1) throw std::invalid_argument("the second fails");
        try {
          group.all_reduce(at::ones({2}), Reduction::kSum, job.call_options())->wait();
        } catch (const base::CancelledError&) {
          cancelled = true;
          throw;
        }
        return {};
      };
      const auto begin = Clock::now();
      expect_error<std::invalid_argument>([&] { job.session.job().run_step({2, microbatch, [] {}}); },
                                          "the second fails");
      EXPECT_TRUE(cancelled);
      EXPECT_LE(Clock::now() - begin, 5s);
    }
    job.meet();
  };
  in_job(2, body, config);
}

}  // namespace
}  // namespace lamina::collective
