// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/exchange.h"

#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <map>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "tests/comes_true.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::messaging {
namespace {

using base::Rank;

const base::Patience kPatience{std::chrono::seconds(30), nullptr};

// Messages on their way.
using Sent = std::map<std::pair<std::size_t, std::size_t>, std::string>;  // from, to

TEST(Meetings, GiveEachMemberWhatAllHaveInTheirOrderWithFewMessages) {
  for (std::size_t members = 1; members <= 40; ++members) {
    std::vector<std::string> has;
    std::vector<std::size_t> next(members, 0), sent(members, 0);
    std::vector<bool> has_given(members, false);
    Sent on_its_way;
    for (std::size_t member = 0; member < members; ++member) has.push_back(base::str(member, " "));
    std::string all;
    for (const auto& each : has) all += each;
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (std::size_t member = 0; member < members; ++member) {
        const auto plan = meetings(member, members);
        if (next[member] == plan.size()) continue;
        const auto& meeting = plan[next[member]];
        const auto with = meeting.with;
        if (meeting.gives && !has_given[member]) {
          ASSERT_TRUE(on_its_way.try_emplace({member, with}, has[member]).second) << "one message at most";
          ++sent[member];
          goes_on = has_given[member] = true;
        }
        const auto taken = on_its_way.find({with, member});
        if (meeting.takes && taken == on_its_way.end()) continue;
        if (meeting.takes) {
          has[member] = meeting.ends    ? taken->second
                        : with < member ? taken->second + has[member]
                                        : has[member] + taken->second;
        }
        ++next[member];
        has_given[member] = false;
        goes_on = true;
      }
    }
    for (std::size_t member = 0; member < members; ++member) {
      EXPECT_EQ(has[member], all) << member << " of " << members;
      EXPECT_LE(sent[member], std::bit_width(members)) << member << " of " << members;
    }
  }
}

// Runs a barrier of all, each rank of which `of` may keep from it by throwing, with so long a patience.
std::vector<std::string> barrier_errors(Mailboxes& boxes, std::chrono::milliseconds timeout,
                                        const std::function<void(int)>& of) {
  const auto errors = boxes.run([&](int rank) {
    of(rank);
    base::Patience patience{timeout, nullptr};
    patience.call = [] { return base::Call{"lamina.barrier()", "a.py:1", "a"}; };
    boxes[rank].barrier(boxes.ranks(), patience);
  });
  std::vector<std::string> texts;
  for (const auto& error : errors) {
    try {
      if (error) std::rethrow_exception(error);
      texts.emplace_back("");
    } catch (const base::TimeoutError& timeout_error) {
      texts.push_back(base::str("TimeoutError: ", timeout_error.what()));
    } catch (const base::PeerError& lost) {
      EXPECT_TRUE(lost.loss());
      texts.push_back(base::str("PeerError: ", lost.what()));
    } catch (const std::exception& other) {
      texts.push_back(base::str("other: ", other.what()));
    }
  }
  return texts;
}

void expect_all_name(int away, int size) {
  Mailboxes boxes(size, 1);
  const auto texts = barrier_errors(boxes, std::chrono::milliseconds(1500), [&](int rank) {
    if (rank == away) throw std::runtime_error("away");
  });
  for (int rank = 0; rank < size; ++rank) {
    if (rank == away) continue;
    EXPECT_TRUE(texts[rank].starts_with("TimeoutError: ")) << texts[rank];
    EXPECT_NE(texts[rank].find(base::str("from rank ", away, " in lamina.barrier() at a.py:1")), std::string::npos)
        << rank << " of " << size << ": " << texts[rank];
  }
}

// Ranks that wait for one that waits for it blame the one that has not come, wherever that stands.
TEST(Exchange, ThatNeverEndsNamesTheRankThatHasNotComeOnAll) {
  std::vector<std::thread> jobs;
  for (const auto [away, size] :
       {std::pair(0, 3), std::pair(1, 3), std::pair(3, 6), std::pair(0, 8), std::pair(7, 8)}) {
    jobs.emplace_back(expect_all_name, away, size);
  }
  for (auto& job : jobs) job.join();
}

TEST(Exchange, NamesTheRankThatKeepsOneFromComing) {
  Mailboxes boxes(4, 2);
  const auto texts = barrier_errors(boxes, std::chrono::milliseconds(1500), [&](int rank) {
    if (rank == 3) throw std::runtime_error("away");
    if (rank == 2) boxes[2].receive(Rank(3), "user", {std::chrono::milliseconds(1600), nullptr});
  });
  EXPECT_NE(texts[0].find("from rank 2 in lamina.barrier()"), std::string::npos) << texts[0];
  EXPECT_NE(texts[0].find("; rank 2 waits for what comes from rank 3"), std::string::npos) << texts[0];
  EXPECT_NE(texts[1].find("from rank 3 in lamina.barrier()"), std::string::npos) << texts[1];
}

TEST(Exchange, EndsOnAllWithTheLossOfAMember) {
  Mailboxes boxes(7, 3);
  const auto texts = barrier_errors(boxes, std::chrono::milliseconds(30000), [&](int rank) {
    if (rank != 4) return;
    boxes.network().kill(Rank(4));
    throw std::runtime_error("killed");
  });
  for (int rank = 0; rank < 7; ++rank) {
    if (rank == 4) continue;
    EXPECT_TRUE(texts[rank].starts_with("PeerError: ")) << texts[rank];
    EXPECT_NE(texts[rank].find("rank 4 is lost"), std::string::npos) << texts[rank];
  }
}

// Rank 3 owes rank 1 what rank 4 would have given, and that one rank 0. What was sent is no part of the next exchange.
TEST(Exchange, ThatOneIsInterruptedInFailsOnThoseWhoLackItsMessagesAndTheNextIsExact) {
  Mailboxes boxes(5, 4);
  std::atomic<bool> left = false;
  const auto errors = boxes.run([&](int rank) {
    const base::Patience patience{std::chrono::seconds(30), [rank] {
                                    if (rank == 3) throw base::CancelledError("interrupted");
                                  }};
    if (rank == 4) EXPECT_TRUE(comes_true([&] { return left.load(); }));
    const auto over = c10::make_scope_exit([&] { left = left || rank == 3; });
    boxes[rank].barrier(boxes.ranks(), patience);
  });
  for (const int rank : {0, 1, 3}) {
    try {
      ASSERT_TRUE(errors[rank]) << rank;
      std::rethrow_exception(errors[rank]);
    } catch (const base::CancelledError& error) {
      EXPECT_STREQ(error.what(), rank == 3 ? "interrupted" : "on rank 3: interrupted");
    }
  }
  for (const auto& error : boxes.run([&](int rank) {
         for (std::int64_t round = 0; round < 20; ++round) {
           boxes[rank].barrier(boxes.ranks(), kPatience);
           const auto values = boxes[rank].all_gather(boxes.ranks(), 10 * round + rank, kPatience);
           for (int i = 0; i < 5; ++i) ASSERT_EQ(values[i].as<std::int64_t>(), 10 * round + i);
         }
       })) {
    EXPECT_FALSE(error);
  }
}

TEST(Channels, HaveShortNamesThatTellGroupsApart) {
  const auto name = [](std::vector<std::int64_t> ranks) {
    std::vector<Rank> members(ranks.begin(), ranks.end());
    return group_channel("x", members);
  };
  EXPECT_EQ(name({0, 1, 2, 3}), "x 0-3");
  EXPECT_EQ(name({1, 5, 9}), "x 1-9/4");
  EXPECT_EQ(name({2, 0}), "x 2 0");
  EXPECT_EQ(name({0, 1}), "x 0 1");
  EXPECT_EQ(name({0, 1, 4, 5, 8, 9}), "x 0 1 4 5 8 9");
  EXPECT_EQ(name({7}), "x 7");
}

}  // namespace
}  // namespace lamina::messaging
