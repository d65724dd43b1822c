// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <unistd.h>

#include "lamina/base/error.h"
#include "lamina/dist/dist.h"
#include "tests/dist/rank_forks.h"

namespace lamina::dist {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using testing::expect_error;
using testing::RankForks;

TEST(Start, ARankThatIsMissingIsNamedWithinTheTimeoutAnd1s) {
  RankForks ranks(3);
  for (int rank : {0, 2}) {
    ranks.start(rank, [] {
      const auto begin = Clock::now();
      expect_error<base::TimeoutError>([] { initialize_dist("cpu", 1s); }, "rank 1 did not join within 1 s");
      EXPECT_LE(Clock::now() - begin, 2s);
    });
  }
  ranks.expect_success();
}

TEST(Start, OfManyThatAreMissingEachIsNamed) {
  RankForks ranks(5);
  for (int rank : {0, 4}) {
    ranks.start(rank, [] {
      expect_error<base::TimeoutError>([] { initialize_dist("cpu", 1s); }, "ranks 1-3 did not join within 1 s");
    });
  }
  ranks.expect_success();
}

TEST(Start, WhereRank0IsMissingTheOthersSaySo) {
  RankForks ranks(2);
  ranks.start(1, [] { expect_error<base::TimeoutError>([] { initialize_dist("cpu", 1s); }, "did rank 0 start?"); });
  ranks.expect_success();
}

TEST(Start, TwoProcessesOfOneRankAreAnError) {
  RankForks ranks(2);
  ranks.start(0, [] {
    initialize_dist("cpu", 20s);
    barrier();
  });
  // Both are rank 1: the one that comes second is told; the other one is in the job.
  int told[2];
  ASSERT_EQ(::pipe(told), 0);
  for (int process : {1, 2}) {
    ranks.start(
        process,
        [&] {
          try {
            initialize_dist("cpu", 20s);
            char byte = 0;
            ASSERT_EQ(::read(told[0], &byte, 1), 1);
            barrier();
          } catch (const base::ConfigError& error) {
            EXPECT_THAT(error.what(), HasSubstr("two processes call themselves rank 1"));
            ASSERT_EQ(::write(told[1], "x", 1), 1);
          }
        },
        ranks.variables(1));
  }
  ranks.expect_success();
}

TEST(Start, DifferentNumbersOfRanksAreAnError) {
  RankForks ranks(2);
  ranks.start(0, [] { expect_error<base::ConfigError>([] { initialize_dist("cpu", 20s); }, "ranks 0 and 1 differ"); });
  auto other = ranks.variables(1);
  other["WORLD_SIZE"] = other["LOCAL_WORLD_SIZE"] = "3";
  ranks.start(
      1, [] { expect_error<base::ConfigError>([] { initialize_dist("cpu", 20s); }, "ranks 0 and 1 differ"); }, other);
  ranks.expect_success();
}

TEST(Start, WhatCannotBeIsSaidBeforeAnythingStarts) {
  testing::alone([] {
    expect_error<base::ConfigError>([] { initialize_dist("gpu"); }, "\"gpu\" is not allowed");
    expect_error<base::ConfigError>([] { initialize_dist("cpu", 0s); }, "timeout: 0 ms is not allowed");
    EXPECT_FALSE(is_initialized());
    ::setenv("RANK", "0", 1);
    ::setenv("WORLD_SIZE", "2", 1);
    expect_error<base::ConfigError>([] { initialize_dist(); }, "MASTER_ADDR is not set");
    ::setenv("WORLD_SIZE", "1", 1);
    initialize_dist();
    EXPECT_TRUE(is_initialized()) << "the variables of a single rank need no address";
  });
}

TEST(Start, TwiceIsOnceAndAnotherMayFollowItsEnd) {
  testing::in_world(2, [] {
    initialize_dist();
    for (int again = 0; again < 3; ++again) {
      barrier();
      destroy_dist();
      EXPECT_FALSE(is_initialized());
      initialize_dist("cpu", 30s);
    }
  });
}

TEST(Loss, OfAKilledRankIsAPeerErrorWithin2s) {
  RankForks ranks(3);
  for (int rank : {0, 1, 2}) {
    ranks.start(rank, [] {
      initialize_dist("cpu", 30s);
      auto begin = Clock::now();
      const auto meet = [&] {
        barrier();
        begin = Clock::now();
      };
      if (get_global_rank() == 2) {
        meet();
        ::kill(::getpid(), SIGKILL);
      }
      // A slow rank may still meet the others as it hears.
      EXPECT_THROW((meet(), all_reduce(at::ones({10}))), base::PeerError);
      EXPECT_LE(Clock::now() - begin, 2s);
    });
  }
  ranks.expect_success({2});
}

TEST(Loss, OfRank0WhichHoldsTheStoreToo) {
  RankForks ranks(2);
  for (int rank : {0, 1}) {
    ranks.start(rank, [] {
      initialize_dist("cpu", 30s);
      if (get_global_rank() == 0) {
        barrier();
        ::kill(::getpid(), SIGKILL);
      }
      EXPECT_THROW((barrier(), all_gather_object(Value())), base::PeerError);
    });
  }
  ranks.expect_success({0});
}

TEST(Loss, ARankThatDoesNotComeIsATimeoutError) {
  RankForks ranks(2);
  int done[2];
  ASSERT_EQ(::pipe(done), 0);
  for (int rank : {0, 1}) {
    ranks.start(rank, [&] {
      initialize_dist("cpu", 3s);  // time enough to make the group on a busy machine
      char byte = 'x';
      if (get_global_rank() == 1) {
        ASSERT_EQ(::read(done[0], &byte, 1), 1);
        return;
      }
      expect_error<base::TimeoutError>([] { all_reduce(at::ones({1})); }, "[rank 0/2] all_reduce(): ");
      ASSERT_EQ(::write(done[1], &byte, 1), 1);
    });
  }
  ranks.expect_success();
}

}  // namespace
}  // namespace lamina::dist
