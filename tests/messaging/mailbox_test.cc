// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/mailbox.h"

#include <gtest/gtest.h>

#include <atomic>
#include <utility>

#include "lamina/base/error.h"
#include "tests/comes_true.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::messaging {
namespace {

using value::Value;

const base::Patience kPatience{std::chrono::seconds(30), nullptr};

std::int64_t number(const Value& value) { return value.as<std::int64_t>(); }

void expect_none(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors) EXPECT_EQ(error, nullptr);
}

TEST(Mailbox, EachChannelOfEachPairKeepsItsOrder) {
  Mailboxes boxes(3);
  for (std::int64_t i = 0; i < 100; ++i) {
    boxes[0].send(base::Rank(2), i % 2 == 0 ? "even" : "odd", i);
    boxes[1].send(base::Rank(2), "even", -i);
  }
  for (std::int64_t i = 1; i < 100; i += 2) EXPECT_EQ(number(boxes[2].receive(base::Rank(0), "odd", kPatience)), i);
  for (std::int64_t i = 0; i < 100; ++i) EXPECT_EQ(number(boxes[2].receive(base::Rank(1), "even", kPatience)), -i);
  for (std::int64_t i = 0; i < 100; i += 2) EXPECT_EQ(number(boxes[2].receive(base::Rank(0), "even", kPatience)), i);
}

// One after the other, the waits for members would take two time-outs.
TEST(Mailbox, AnExchangeEndsAtItsTimeoutThoughAMemberCameLate) {
  Mailboxes boxes(3);
  const auto timeout = std::chrono::milliseconds(1500);
  boxes.network().hold(base::Rank(1), base::Rank(0));
  const auto begin = base::Clock::now();
  bool released = false;
  const base::Patience patience{timeout, [&] {
                                  if (base::Clock::now() - begin < timeout * 2 / 3) return;
                                  if (!std::exchange(released, true)) {
                                    boxes.network().release(base::Rank(1), base::Rank(0));
                                  }
                                }};
  boxes.run([&](int rank) {
    if (rank == 2) return;
    EXPECT_THROW(boxes[rank].barrier(boxes.ranks(), rank == 0 ? patience : base::Patience{timeout, [] {}}),
                 base::TimeoutError);
    if (rank == 0) {
      EXPECT_LT(base::Clock::now() - begin, timeout * 3 / 2);
    }
  });
}

TEST(Mailbox, ARankMaySendToItself) {
  Mailboxes boxes(1);
  boxes[0].send(base::Rank(0), "x", std::int64_t{7});
  EXPECT_EQ(number(boxes[0].receive(base::Rank(0), "x", kPatience)), 7);
}

TEST(Mailbox, OneThreadAtATimeExchangesWithTheSameRanks) {
  Mailboxes boxes(2);
  std::atomic<int> refused = 0;
  const auto gather = [&](int rank, std::int64_t value) {
    try {
      const auto all = boxes[rank].all_gather(boxes.ranks(), value, kPatience);
      EXPECT_EQ(number(all[rank]), value);
      EXPECT_EQ(number(all[1 - rank]) / 10, 1 - rank);
    } catch (const base::UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 0 came to an exchange"), std::string::npos) << error.what();
      ++refused;
    }
  };
  std::thread one(gather, 0, 1), other(gather, 0, 2);
  EXPECT_TRUE(comes_true([&] { return refused > 0; }));
  gather(1, 10);
  one.join();
  other.join();
  EXPECT_EQ(refused, 1);
  expect_none(boxes.run([&](int rank) { gather(rank, rank * 10); }));
}

TEST(Mailbox, KnowsWhichOfTheRanksAskedForIsLost) {
  Mailboxes boxes(3);
  const std::vector<base::Rank> pair = {base::Rank(0), base::Rank(1)};
  boxes[0].lose({base::Rank(2), "its process ended", ""});
  EXPECT_FALSE(boxes[0].loss(pair, {}));
  EXPECT_EQ(boxes[0].loss(boxes.ranks(), {})->text(), "rank 2 is lost: its process ended");
  boxes[0].lose({base::Rank(1), "it called shutdown", ""});
  EXPECT_EQ(boxes[0].first_loss()->text(), "rank 2 is lost: its process ended");
  EXPECT_FALSE(boxes[1].first_loss());
}

TEST(Mailbox, WaitsForALossNoLongerThanUntilItIsKnown) {
  Mailboxes boxes(2);
  expect_none(boxes.run([&](int rank) {
    if (rank == 1) {
      boxes[0].lose({base::Rank(1), "its process ended", ""});
    } else {
      EXPECT_EQ(boxes[0].loss(boxes.ranks(), std::chrono::hours(1))->text(), "rank 1 is lost: its process ended");
    }
  }));
}

TEST(AllGather, GivesEveryMemberAllValuesInTheOrderOfTheMembersTimeAfterTime) {
  Mailboxes boxes(4, 1);
  expect_none(boxes.run([&](int rank) {
    for (std::int64_t round = 0; round < 50; ++round) {
      const auto values = boxes[rank].all_gather(boxes.ranks(), round * 10 + rank, kPatience);
      for (int other = 0; other < 4; ++other) ASSERT_EQ(number(values.at(other)), round * 10 + other);
    }
  }));
}

TEST(AllGather, OfOverlappingGroupsDoNotMix) {
  Mailboxes boxes(3, 2);
  const std::vector<base::Rank> pair = {base::Rank(2), base::Rank(0)};
  expect_none(boxes.run([&](int rank) {
    for (std::int64_t round = 0; round < 20; ++round) {
      if (rank != 1) {
        const auto values = boxes[rank].all_gather(pair, std::int64_t{rank}, kPatience);
        ASSERT_EQ(number(values.at(0)), 2);
        ASSERT_EQ(number(values.at(1)), 0);
      }
      ASSERT_EQ(number(boxes[rank].all_gather(boxes.ranks(), 10 * round + rank, kPatience).at(1)), 10 * round + 1);
    }
  }));
}

TEST(Barrier, NobodyPassesBeforeEveryoneHasComeTimeAfterTime) {
  Mailboxes boxes(4, 3);
  std::atomic<int> come = 0;
  expect_none(boxes.run([&](int rank) {
    for (int round = 1; round <= 50; ++round) {
      ++come;
      boxes[rank].barrier(boxes.ranks(), kPatience);
      ASSERT_GE(come, 4 * round);
    }
  }));
}

TEST(LostRank, WhatItSentIsReceivedAndThenAPeerErrorNamesIt) {
  Mailboxes boxes(2);
  boxes[1].send(base::Rank(0), "x", std::int64_t{5});
  boxes.network().kill(base::Rank(1));
  EXPECT_EQ(number(boxes[0].receive(base::Rank(1), "x", kPatience)), 5);
  try {
    boxes[0].receive(base::Rank(1), "x", kPatience);
    FAIL();
  } catch (const base::PeerError& error) {
    EXPECT_NE(std::string(error.what()).find("rank 1 is lost"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("\"x\""), std::string::npos) << error.what();
    ASSERT_TRUE(error.loss());
    EXPECT_EQ(error.loss()->rank, base::Rank(1));
    EXPECT_EQ(error.loss()->cause, "its process ended");
  }
}

TEST(LostRank, EndsTheWaitsOfEverySurvivor) {
  Mailboxes boxes(3);
  const auto errors = boxes.run([&](int rank) {
    if (rank == 1) return boxes.network().kill(base::Rank(1));
    boxes[rank].barrier(boxes.ranks(), kPatience);
  });
  for (int rank : {0, 2}) EXPECT_THROW(std::rethrow_exception(errors[rank]), base::PeerError);
}

TEST(Deadline, AValueThatDoesNotComeIsATimeoutThatNamesChannelAndRank) {
  Mailboxes boxes(2);
  try {
    boxes[0].receive(base::Rank(1), "plans", {std::chrono::milliseconds(20), nullptr});
    FAIL();
  } catch (const base::TimeoutError& error) {
    EXPECT_NE(std::string(error.what()).find("\"plans\" from rank 1"), std::string::npos) << error.what();
  }
  boxes[1].send(base::Rank(0), "plans", std::int64_t{1});  // late, but not lost
  EXPECT_EQ(number(boxes[0].receive(base::Rank(1), "plans", kPatience)), 1);
}

TEST(Interrupt, EndsAWaitWithWhatItThrew) {
  Mailboxes boxes(2);
  struct Interrupted {};
  const base::Patience patience{std::chrono::seconds(30), [] { throw Interrupted(); }};
  EXPECT_THROW(boxes[0].receive(base::Rank(1), "x", patience), Interrupted);
  EXPECT_THROW(boxes[0].barrier(boxes.ranks(), patience), Interrupted);
}

}  // namespace
}  // namespace lamina::messaging
