// SPDX-License-Identifier: Apache-2.0
// Jobs so large that not all ranks are connected from the start: those at a distance of 3 of 8 or 9 are not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/messaging/relay.h"
#include "lamina/transport/ucx/probe.h"
#include "tests/messaging/rank_end.h"
#include "tests/transport/rank_processes.h"

namespace lamina::transport {
namespace {

using base::Rank;
using ::testing::HasSubstr;
using testing::Inbox;
using testing::object;
using testing::RankProcesses;
using Clock = std::chrono::steady_clock;

Rank across(const Transport& transport) { return Rank((transport.rank().value + 3) % transport.size()); }

TEST(UcxConnect, SocketsAreThoseToNeighboursAndToRanksThatTalkWithThisOne) {
  RankProcesses job(8);
  job.run([&](Transport& transport, Inbox& inbox) {
    auto& probe = dynamic_cast<ucx::Probe&>(transport);
    EXPECT_EQ(probe.sockets(), 5);
    job.reach(0);
    job.await(0, 8);
    const bool sends = transport.rank().value % 2 == 0;
    if (sends) {
      transport.send(across(transport), object("hello", 1l));
    } else {
      EXPECT_EQ(inbox.next().fields, "hello");
    }
    EXPECT_EQ(probe.sockets(), 6);
    job.reach(1);
    job.await(1, 8);
  });
  job.expect_success();
}

TEST(UcxConnect, AllPairsMayUseEachOtherAtOnce) {
  RankProcesses job(9);
  job.run([&](Transport& transport, Inbox& inbox) {
    for (int to = 0; to < 9; ++to) {
      if (to != transport.rank().value) transport.tell(Rank(to), object("told", std::int64_t(1)));
    }
    for (int to = 0; to < 9; ++to) {
      if (to != transport.rank().value) transport.send(Rank(to), object("sent", std::int64_t(2)));
    }
    std::map<std::string, int> heard;
    for (int i = 0; i < 16; ++i) ++heard[inbox.next().fields];
    EXPECT_EQ(heard["told"], 8);
    EXPECT_EQ(heard["sent"], 8);
    job.reach(0);
    job.await(0, 9);
    EXPECT_EQ(dynamic_cast<ucx::Probe&>(transport).dropped(), 0);
  });
  job.expect_success();
}

TEST(UcxConnect, WordsToARankWithoutAConnectionComeBeforeWhatIsSentAndBeforeTheEnd) {
  RankProcesses job(8);
  job.run([&](Transport& transport, Inbox& inbox) {
    for (std::int64_t i = 0; i < 3; ++i) transport.tell(across(transport), object("told", i));
    if (transport.rank().value % 2 == 0) transport.send(across(transport), object("sent", std::int64_t(3)));
    const std::int64_t count = transport.rank().value % 2 == 1 ? 4 : 3;
    for (std::int64_t i = 0; i < count; ++i) EXPECT_EQ(inbox.next().body.as<std::int64_t>(), i);
  });
  job.expect_success();
}

// Ranks of a job die or leave, and all others hear why, in time, each of them once.
void expect_all_told(int size, const std::vector<int>& ended, const std::string& why,
                     const std::function<void(Transport&)>& end) {
  const auto has_ended = [&](std::int64_t rank) { return std::ranges::find(ended, rank) != ended.end(); };
  RankProcesses job(size);
  const int others = size - static_cast<int>(ended.size());
  job.run([&](Transport& transport, Inbox& inbox) {
    const std::int64_t own = transport.rank().value;
    job.reach(0);
    job.await(1, size);
    if (has_ended(own)) return end(transport);
    for (const int rank : ended) EXPECT_EQ(inbox.lost(Rank(rank)), why);
    job.reach(2);
    for (const int rank : ended) EXPECT_THROW(transport.send(Rank(rank), object("c", 1l)), base::PeerError);
    for (std::int64_t to = 0; to < size; ++to) {
      if (to != own && !has_ended(to)) transport.tell(Rank(to), object("still here", 1l));
    }
    for (int from = 1; from < others; ++from) EXPECT_EQ(inbox.next().fields, "still here");
    EXPECT_EQ(inbox.losses(), static_cast<int>(ended.size()));
    job.reach(3);
    job.await(3, others);
  });
  job.await(0, size);
  const auto begin = Clock::now();
  for (int rank = 0; rank < size; ++rank) job.reach(1);
  job.await(2, others);
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(2));
  for (const int rank : ended) job.wait(rank);
  job.expect_success();
}

void die(Transport& /*transport*/) { ::raise(SIGKILL); }

TEST(UcxConnect, ADeadRankIsToldToThoseWithoutAConnection) { expect_all_told(9, {4}, "its process ended", die); }

TEST(UcxConnect, ARunOfRanksThatDieTogetherIsToldToAll) {
  expect_all_told(12, {3, 4, 5, 6, 7}, "its process ended", die);
}

TEST(UcxConnect, ARankThatLeavesIsToldToThoseWithoutAConnection) {
  expect_all_told(9, {4}, "it called shutdown", [](Transport& transport) { transport.close(true); });
}

// The neighbours of rank 0 leave, so that it is connected with nobody; then one dies with which it never was.
TEST(UcxConnect, WhenTheRanksBetweenHaveLeftTheOthersStillHearOfALoss) {
  constexpr int kSize = 8, kDies = 3, kStays = 5;
  RankProcesses job(kSize);
  job.run([&](Transport& transport, Inbox& inbox) {
    const std::int64_t own = transport.rank().value;
    job.reach(0);
    job.await(0, kSize);
    if (own != 0 && own != kDies && own != kStays) return;
    for (const int left : {1, 2, 4, 6, 7}) EXPECT_EQ(inbox.lost(Rank(left)), "it called shutdown");
    job.reach(1);
    if (own == kDies) {
      job.await(1, 3);
      std::this_thread::sleep_for(std::chrono::seconds(1));  // for neighbours to be found; there is no sign of that
      ::raise(SIGKILL);
    }
    EXPECT_EQ(inbox.lost(Rank(kDies)), "its process ended");
    job.reach(2);
    job.await(2, 2);
  });
  job.wait(kDies);
  const auto died = Clock::now();
  job.await(2, 2);
  EXPECT_LT(Clock::now() - died, std::chrono::seconds(2));
  job.expect_success();
}

// A frozen process takes connections no more than messages.
TEST(UcxConnect, ARankThatIsFrozenAtItsFirstUseIsNamedAsAtTheStart) {
  RankProcesses job(8);
  for (int rank = 0; rank < 8; ++rank) {
    job.start(rank, [&, rank] {
      auto options = job.options(rank);
      options.send_timeout = std::chrono::seconds(2);
      const auto transport = open_ucx(options);
      Inbox inbox;
      transport->start(inbox.events());
      job.reach(0);
      if (rank == 0) {
        job.await(1);
        try {
          transport->send(Rank(3), object("c", 1l));
          ADD_FAILURE() << "a frozen rank has connected";
        } catch (const base::TimeoutError& error) {
          EXPECT_THAT(error.what(), HasSubstr("no connection with rank 3 in time"));
          EXPECT_THAT(error.what(), HasSubstr("[start-no-connection]"));
        }
        job.reach(2);
      }
      job.await(3);
      transport->close(true);
    });
  }
  job.await(0, 8);
  job.kill(3, SIGSTOP);
  int status = 0;
  EXPECT_EQ(::waitpid(job.process(3), &status, WUNTRACED), job.process(3));
  job.reach(1);
  job.await(2);
  job.kill(3, SIGCONT);
  job.reach(3);
  job.expect_success();
}

// Ranks of 12 to which something happens at once; each has sockets to 6 others.
struct Troubles {
  std::vector<int> fail, die, freeze;
};

// Ranks that are left hear why others failed, in time, each first from itself, and open no connection for it.
void expect_failures_told(const Troubles& troubles) {
  constexpr int kSize = 12;
  const auto has = [](const std::vector<int>& ranks, int rank) {
    return std::ranges::find(ranks, rank) != ranks.end();
  };
  RankProcesses job(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    job.start(rank, [&, rank] {
      auto transport = open_ucx(job.options(rank));
      auto& probe = dynamic_cast<ucx::Probe&>(*transport);
      messaging::RankEnd end(std::move(transport));
      end.messenger.start();
      job.reach(0);
      job.await(1);
      if (has(troubles.die, rank)) ::raise(SIGKILL);
      if (has(troubles.freeze, rank)) ::raise(SIGSTOP);
      if (has(troubles.fail, rank))
        messaging::tell_failed(end.messenger.transport(), base::str("device ", rank, " failed"));
      for (const int failed : troubles.fail) {
        const Rank ranks[] = {Rank(failed)};
        const auto loss = end.messenger.mailbox().loss(ranks, std::chrono::seconds(30));
        EXPECT_EQ(loss ? loss->cause : "nothing is heard", base::str("device ", failed, " failed")) << rank;
      }
      if (troubles.die.empty()) {
        EXPECT_EQ(probe.sockets(), 6);
      }
      job.reach(2);
      job.await(3);
      end.messenger.close(true);
    });
  }
  job.await(0, kSize);
  const auto begin = Clock::now();
  job.reach(1);
  job.await(2, kSize - static_cast<int>(troubles.die.size() + troubles.freeze.size()));
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(2));
  for (const int rank : troubles.freeze) job.kill(rank, SIGCONT);
  job.reach(3);
  for (const int rank : troubles.die) job.wait(rank);
  job.expect_success();
}

TEST(UcxConnect, AFailureIsToldToAllAlongConnectionsThatAreThere) { expect_failures_told({.fail = {5}}); }

TEST(UcxConnect, SeveralFailuresAtOnceAreToldEachInItsWords) { expect_failures_told({.fail = {0, 5, 6}}); }

TEST(UcxConnect, AFailureIsToldToAllWhereRanksBetweenDieAndAreFrozen) {
  expect_failures_told({.fail = {5}, .die = {4, 7}, .freeze = {6, 9}});
}

}  // namespace
}  // namespace lamina::transport
