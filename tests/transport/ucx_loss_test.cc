// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <future>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "tests/transport/rank_processes.h"

namespace lamina::transport {
namespace {

using base::Rank;
using testing::Inbox;
using testing::object;
using testing::RankProcesses;
using value::List;
using Clock = std::chrono::steady_clock;

at::Tensor bytes(std::int64_t size, int filled_with) { return at::full({size}, filled_with, at::kByte); }

// Sends until that throws, and expects PeerError.
void send_until_lost(Transport& transport, Rank to, std::int64_t size) {
  EXPECT_THROW(
      {
        for (const auto end = Clock::now() + std::chrono::minutes(1); Clock::now() < end;) {
          transport.send(to, object("c", bytes(size, 1)));
        }
      },
      base::PeerError);
}

TEST(UcxLoss, AKilledRankIsToldToAllWithinTwoSeconds) {
  RankProcesses job(3);
  job.run([&](Transport& transport, Inbox& inbox) {
    job.reach(0);
    if (transport.rank() == Rank(1)) {
      job.await(0, 3);
      ::raise(SIGKILL);
    }
    EXPECT_EQ(inbox.lost(Rank(1)), "its process ended");
    job.reach(1);
    EXPECT_THROW(transport.send(Rank(1), object("c", 1l)), base::PeerError);
    const Rank other(2 - transport.rank().value);
    transport.send(other, object("still here", 1l));
    EXPECT_EQ(inbox.next().fields, "still here");
  });
  job.await(0, 3);
  const auto killed = Clock::now();
  job.await(1, 2);
  EXPECT_LT(Clock::now() - killed, std::chrono::seconds(2));
  EXPECT_EQ(job.wait(1), SIGKILL);
  job.expect_success();
}

// Rank 0 of two acts while the other one is stopped.
void beside_a_frozen_rank(const std::function<void(Transport&)>& act) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox&) {
    if (transport.rank() == Rank(1)) {
      job.reach(0);
      job.await(3);
      return;
    }
    job.await(1);
    act(transport);
    job.reach(2);
  });
  job.await(0);
  job.kill(1, SIGSTOP);
  job.reach(1);
  job.await(2);
  job.kill(1, SIGCONT);
  job.reach(3);
  job.expect_success();
}

// A frozen rank takes what fits into its queue and no more.
TEST(UcxLoss, AFrozenRankHoldsUpNobodyWhoTellsItSomethingAndSendsToItAreGivenUp) {
  beside_a_frozen_rank([](Transport& transport) {
    const auto begin = Clock::now();
    for (std::int64_t i = 0; i < 5000; ++i) transport.tell(Rank(1), object("told", i));
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
    auto message = object("sent", bytes(32 << 20, 1));
    message.call.step = base::Step(3);
    const auto given_up = std::async(std::launch::async, [&] {
      EXPECT_THROW(transport.send(Rank(1), message), base::CancelledError);
      message.call.step = kNoStep;
      EXPECT_THROW(transport.send(Rank(1), message), base::CancelledError);
    });
    transport.give_up_sends(base::Step(3));
    transport.give_up_sends(std::nullopt);
    EXPECT_EQ(given_up.wait_for(std::chrono::seconds(5)), std::future_status::ready);
  });
}

// It answers nothing, and whoever leaves has waited for it already.
TEST(UcxLoss, AFrozenRankHoldsUpNoOrderlyEnd) {
  beside_a_frozen_rank([](Transport& transport) {
    const auto begin = Clock::now();
    transport.close(/*orderly=*/true);
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(4));
  });
}

TEST(UcxLoss, MessagesSentBeforeTheDeathArriveFirst) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    if (transport.rank() == Rank(1)) {
      for (std::int64_t i = 0; i < 5; ++i) transport.send(Rank(0), object("c", i));
      ::raise(SIGKILL);
    }
    EXPECT_EQ(inbox.lost(Rank(1)), "its process ended");
    ASSERT_EQ(inbox.waiting(), 5);
    for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(inbox.next().body.as<std::int64_t>(), i);
  });
  EXPECT_EQ(job.wait(1), SIGKILL);
  job.expect_success();
}

TEST(UcxLoss, ARankThatLeavesOnPurposeIsToldApartFromADeadOne) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    if (transport.rank() == Rank(1)) {
      for (std::int64_t i = 0; i < 100; ++i) transport.send(Rank(0), object("c", List{{i, bytes(100000, 1)}}));
      return;
    }
    EXPECT_EQ(inbox.lost(Rank(1)), "it called shutdown");
    EXPECT_EQ(inbox.waiting(), 100);
    EXPECT_THROW(transport.send(Rank(1), object("c", 1l)), base::PeerError);
  });
  job.expect_success();
}

// The kill falls at a random moment into traffic in all directions, where UCX copies from the dead process's memory.
class UcxLossInTraffic : public ::testing::TestWithParam<int> {};

TEST_P(UcxLossInTraffic, SurvivorsGetPeerError) {
  RankProcesses job(3);
  const std::int64_t size = GetParam() % 3 == 0 ? 2000 : GetParam() % 3 == 1 ? 300000 : 8 << 20;
  job.run([&](Transport& transport, Inbox& inbox) {
    std::thread drain([&] {
      try {
        while (true) inbox.next();
      } catch (const std::exception&) {
      }
    });
    drain.detach();
    std::thread to_first([&] {
      const std::int64_t me = transport.rank().value;
      if (me != 0) send_until_lost(transport, Rank(3 - me), size);
    });
    job.reach(0);
    if (transport.rank() == Rank(0)) send_until_lost(transport, Rank(1), size);
    EXPECT_EQ(inbox.lost(Rank(1)), "its process ended");
    to_first.join();
    transport.close(false);
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  });
  job.await(0, 3);
  std::this_thread::sleep_for(std::chrono::microseconds(20000 + 7919 * GetParam() % 30000));
  job.kill(1, SIGKILL);
  EXPECT_EQ(job.wait(1), SIGKILL);
  job.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Moments, UcxLossInTraffic, ::testing::Range(0, 12));

}  // namespace
}  // namespace lamina::transport
