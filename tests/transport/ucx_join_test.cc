// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/wait.h"
#include "lamina/environment/address.h"
#include "lamina/rendezvous/hello.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/rendezvous/roll_call.h"
#include "lamina/transport/message.h"
#include "lamina/transport/ucx/wire.h"
#include "tests/transport/rank_processes.h"

namespace lamina::transport {
namespace {

using base::Rank;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Inbox;
using testing::object;
using testing::RankProcesses;

// The error that open_ucx throws as an Expected.
template <class Expected>
std::string refusal(const UcxOptions& options) {
  try {
    open_ucx(options);
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    return base::str("another error: ", error.what());
  }
  return "no error";
}

TEST(UcxJoin, ARankThatNeverJoinsIsNamedToAllOthers) {
  RankProcesses job(3);
  for (const int rank : {0, 1}) {
    job.start(rank, [&, rank] {
      auto options = job.options(rank);
      options.join_timeout = std::chrono::seconds(1);
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_THAT(refusal<base::TimeoutError>(options), HasSubstr("rank 2 did not join within 1 s"));
      EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    });
  }
  job.expect_success();
}

TEST(UcxJoin, ARankThatIsLateIsNamedAfter10sAndJoins) {
  RankProcesses job(2);
  int said[2];
  ASSERT_EQ(::pipe(said), 0);
  job.start(0, [&] {
    ::dup2(said[1], STDERR_FILENO);
    EXPECT_EQ(refusal<base::Error>(job.options(0)), "no error");
  });
  ::close(said[1]);
  std::string heard(4096, '\0');
  heard.resize(std::max<ssize_t>(::read(said[0], heard.data(), heard.size()), 0));  // rank 1 comes after these words
  EXPECT_THAT(heard, HasSubstr("rank 1 did not join for 10 s, still waiting"));
  job.start(1, [&] { EXPECT_EQ(refusal<base::Error>(job.options(1)), "no error"); });
  job.expect_success();
}

TEST(UcxJoin, NobodyAtTheMasterAddress) {
  RankProcesses job(2);
  job.start(1, [&] {
    auto options = job.options(1);
    options.join_timeout = std::chrono::seconds(0);
    EXPECT_THAT(refusal<base::TimeoutError>(options), HasSubstr("did rank 0 start?"));
  });
  job.expect_success();
}

TEST(UcxJoin, AnInterruptEndsTheWait) {
  RankProcesses job(2);
  for (const int rank : {0, 1}) {
    job.start(rank, [&, rank] {
      auto options = job.options(rank);
      options.size = 3;
      const auto begin = std::chrono::steady_clock::now();
      options.check_interrupt = [&] {
        if (std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(500))
          throw std::domain_error("Ctrl-C");
      };
      EXPECT_THAT(refusal<std::domain_error>(options), HasSubstr("Ctrl-C"));
    });
  }
  job.expect_success();
}

TEST(UcxJoin, DifferentConfigurationsAreRefusedOnAllRanks) {
  RankProcesses job(3);
  for (int rank = 0; rank < 3; ++rank) {
    job.start(rank, [&, rank] {
      auto options = job.options(rank);
      options.configuration = rank == 2 ? "microbatches: 8" : "microbatches: 4";
      EXPECT_THAT(refusal<base::ConfigError>(options),
                  AllOf(HasSubstr("ranks 0 and 2"), HasSubstr("configuration"), HasSubstr("microbatches: 8")));
    });
  }
  job.expect_success();
}

TEST(UcxJoin, DifferentNumbersOfRanksAreRefusedOnAllRanks) {
  RankProcesses job(2);
  for (const int rank : {0, 1}) {
    job.start(rank, [&, rank] {
      auto options = job.options(rank);
      options.size = 2 + rank;
      EXPECT_THAT(refusal<base::ConfigError>(options), HasSubstr("ranks 0 and 1 differ in their WORLD_SIZE: 2 and 3"));
    });
  }
  job.expect_success();
}

// Ranks 0 and 1 refuse `other`, which is what rank 2 says, for its `version`.
void expect_refused_on_all_ranks(const rendezvous::Hello& other, const std::string& version, const std::string& own) {
  RankProcesses job(3);
  for (const int rank : {0, 1}) {
    job.start(rank, [&, rank] {
      EXPECT_THAT(refusal<base::ConfigError>(job.options(rank)),
                  AllOf(HasSubstr("ranks 0 and 2"), HasSubstr(version), HasSubstr("rank 0: " + own + "\n"),
                        HasSubstr("rank 2: 0.0.1")));
    });
  }
  job.start(2, [&] {
    const auto deadline = base::Deadline::after(std::chrono::minutes(1));
    rendezvous::JobStore store({"127.0.0.1", job.port(), false, deadline, {}});
    rendezvous::RollCall ranks(store,
                               {rendezvous::next_meeting("join"), Rank(2), 3, std::chrono::minutes(1), deadline});
    ranks.meet();
    ranks.call(other.encode());
    ranks.leave();
  });
  job.expect_success();
}

TEST(UcxJoin, AnotherVersionIsRefusedOnAllRanks) {
  rendezvous::Hello other = rendezvous::Hello::of_this_version();
  const std::string own = std::exchange(other.lamina, "0.0.1");
  expect_refused_on_all_ranks(other, "version of lamina", own);
}

TEST(UcxJoin, AnotherFormatOfMessagesIsRefusedOnAllRanks) {
  rendezvous::Hello other = rendezvous::Hello::of_this_version();
  other.wire = "0.0.1";
  expect_refused_on_all_ranks(other, "version of the format of messages",
                              base::str(kFrameVersion, ".", ucx::kPieceVersion));
}

TEST(UcxJoin, TwoProcessesOfOneRankAreRefused) {
  RankProcesses job(2);
  job.start(0, [&] { EXPECT_THAT(refusal<base::Error>(job.options(0)), HasSubstr("")); });
  job.await(0, 0);
  for (const int process : {1, 2}) {
    job.start(process, [&] {
      auto options = job.options(1);
      options.join_timeout = std::chrono::seconds(2);
      refusal<base::Error>(options);
      job.reach(1);
    });
  }
  job.await(1, 1);  // at least one of the two is told; none hangs
  job.wait(1);
  job.wait(2);
  job.kill(0, 9);
  job.wait(0);
}

TEST(JobStore, WhatOneHasClaimedIsOnesWhenClaimedAgain) {
  RankProcesses job(1);
  job.start(0, [&] {
    rendezvous::JobStore store({"127.0.0.1", job.port(), true, base::Deadline::after(std::chrono::minutes(1)), {}});
    EXPECT_EQ(store.claim("rank 1", "first"), "first");
    EXPECT_EQ(store.claim("rank 1", "first"), "first");
    EXPECT_EQ(store.claim("rank 1", "second"), "first");
  });
  job.expect_success();
}

TEST(UcxJoin, ARankWithAnotherSecretIsNotLetIn) {
  RankProcesses job(2);
  for (const int rank : {0, 1}) {
    job.start(rank, [&, rank] {
      if (rank == 1) {
        const int other = ::memfd_create("other", 0);
        EXPECT_EQ(::write(other, std::string(32, 'x').data(), 32), 32);
        ::setenv("LAMINA_SECRET_FD", std::to_string(other).c_str(), 1);
      }
      auto options = job.options(rank);
      options.join_timeout = std::chrono::seconds(2);
      EXPECT_THAT(refusal<base::ConfigError>(options), HasSubstr("is not signed with this job's secret"));
    });
  }
  job.expect_success();
}

// A stranger who reaches the job's store can read and change what lies there. `change` is made to what rank 0 says,
// before rank 1 is there to read it.
void expect_a_stranger_to_be_noticed(const std::function<void(rendezvous::Hello&)>& change, const char* what) {
  RankProcesses job(2);
  for (const int rank : {0, 1}) {
    job.start(rank, [&, rank] {
      if (rank == 1) job.await(0);
      EXPECT_THAT(refusal<base::ConfigError>(job.options(rank)), HasSubstr(what));
    });
  }
  job.start(2, [&] {
    const auto deadline = base::Deadline::after(std::chrono::minutes(1));
    rendezvous::JobStore store({"127.0.0.1", job.port(), false, deadline, {}});
    const std::string meeting = rendezvous::next_meeting("join"), call = meeting + "call";
    ASSERT_TRUE(store.wait({call}, deadline).empty());
    const std::string said = meeting + store.get(call) + "/hello/0";
    ASSERT_TRUE(store.wait({said}, deadline).empty());
    const std::string text = store.get(said), size = "2 ";
    rendezvous::Hello hello = rendezvous::Hello::decode(text.substr(size.size()));
    EXPECT_TRUE(hello.secret.empty());
    change(hello);
    store.set(said, size + hello.encode());
    job.reach(0);
  });
  job.expect_success();
}

TEST(UcxJoin, WhoChangesAnAddressAtTheStoreIsNoticedByAll) {
  expect_a_stranger_to_be_noticed([](rendezvous::Hello& hello) { hello.liveness_address = "127.0.0.1 9"; },
                                  "what rank 0 says in the job's store is not signed with this job's secret");
}

TEST(UcxJoin, WhoPutsASecretIntoTheStoreIsNoticedByAll) {
  expect_a_stranger_to_be_noticed([](rendezvous::Hello& hello) { hello.secret = std::string(32, 'x'); },
                                  "this rank has a job secret from its launcher and rank 0 has none");
}

TEST(UcxJoin, WithoutTheSecretOfTheOthersNobodyJoins) {
  RankProcesses job(2);
  job.start(0, [&] { EXPECT_THAT(refusal<base::ConfigError>(job.options(0)), HasSubstr("rank 1 says")); });
  job.start(1, [&] {
    ::unsetenv("LAMINA_SECRET_FD");
    EXPECT_THAT(refusal<base::ConfigError>(job.options(1)), HasSubstr("this rank has none: start all alike"));
  });
  job.expect_success();
}

TEST(JobStore, OfALoopbackAddressListensNowhereElse) {
  RankProcesses job(1);
  job.start(0, [&] {
    rendezvous::JobStore store({"127.0.0.1", job.port(), true, base::Deadline::after(std::chrono::minutes(1)), {}});
    EXPECT_NO_THROW(environment::Address::parse(base::str("127.0.0.2 ", job.port())).listen());
    EXPECT_NO_THROW(environment::Address::parse(base::str("::1 ", job.port())).listen());
  });
  job.expect_success();
}

TEST(UcxJoin, WithoutALauncherTheSecretComesFromRankZero) {
  RankProcesses job(2);
  for (const int rank : {0, 1}) {
    job.start(rank, [&, rank] {
      ::unsetenv("LAMINA_SECRET_FD");
      const auto transport = open_ucx(job.options(rank));
      Inbox inbox;
      transport->start(inbox.events());
      transport->send(Rank(1 - rank), object("c", 1l));
      inbox.next();
      transport->close(true);
    });
  }
  job.expect_success();
}

}  // namespace
}  // namespace lamina::transport
