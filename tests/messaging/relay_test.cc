// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/relay.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "lamina/transport/news.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::messaging {
namespace {

using base::Rank;

constexpr auto kInTime = std::chrono::seconds(20);
constexpr auto kChannel = "relayed";

const base::Patience kPatience{kInTime};

base::Loss lost(Mailboxes& boxes, int rank, int of) {
  const Rank ranks[] = {Rank(of)};
  return boxes[rank].loss(ranks, kInTime).value_or(base::Loss{Rank(of), "nobody has said so", ""});
}

// Reasons that a rank gives itself come first, and stay.
void expect_all_know(Mailboxes& boxes, int failed, const std::set<int>& ended) {
  for (int rank = 0; rank < std::ssize(boxes.ranks()); ++rank) {
    if (ended.contains(rank)) continue;
    EXPECT_EQ(lost(boxes, rank, failed).cause, "its device failed") << rank;
  }
}

TEST(Relay, TellsAllRanksThatOneHasFailed) {
  for (const int size : {1, 2, 3, 7, 16, 33}) {
    Mailboxes boxes(size);
    tell_failed(boxes.transport(size / 2), "its device failed");
    expect_all_know(boxes, size / 2, {});
    for (int rank = 0; rank < size; ++rank) EXPECT_EQ(boxes[rank].first_loss()->rank, Rank(size / 2));
  }
}

TEST(Relay, TellsOfSeveralThatFailAtOnceEachInItsWords) {
  Mailboxes boxes(24);
  boxes.run([&](int rank) {
    if (rank % 5 == 0) tell_failed(boxes.transport(rank), base::str("device ", rank, " failed"));
  });
  for (int rank = 0; rank < 24; ++rank) {
    for (const int failed : {0, 5, 10, 15, 20}) {
      EXPECT_EQ(lost(boxes, rank, failed).cause, base::str("device ", failed, " failed"));
    }
  }
}

// Neighbours of the failed rank, which are to pass its words on, but for one of them.
TEST(Relay, TellsAllWhereRanksEndWhileWordsPass) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    std::mt19937_64 random(seed);
    const int size = 4 + static_cast<int>(random() % 30), failed = static_cast<int>(random() % size);
    Mailboxes boxes(size, seed);
    auto beside = transport::neighbours(boxes.ranks(), failed);
    std::ranges::shuffle(beside, random);
    beside.pop_back();
    std::set<int> ended;
    std::thread others([&] {
      for (const auto rank : beside) boxes.network().kill(rank);
    });
    tell_failed(boxes.transport(failed), "its device failed");
    others.join();
    for (const auto rank : beside) ended.insert(static_cast<int>(rank.value));
    ASSERT_NO_FATAL_FAILURE(expect_all_know(boxes, failed, ended)) << seed;
    if (HasFailure()) FAIL() << "seed " << seed;
  }
}

// Nothing comes to a frozen rank, and nothing from it: neighbours of the failed one, but for one of them.
TEST(Relay, TellsAllAroundFrozenRanks) {
  constexpr int kSize = 20, kFailed = 7;
  Mailboxes boxes(kSize);
  auto beside = transport::neighbours(boxes.ranks(), kFailed);
  std::set<int> frozen;
  for (std::size_t i = 1; i < beside.size(); ++i) frozen.insert(static_cast<int>(beside[i].value));
  const auto for_all = [&](const std::function<void(Rank, Rank)>& act) {
    for (const int one : frozen) {
      for (const auto other : boxes.ranks()) {
        act(Rank(one), other);
        act(other, Rank(one));
      }
    }
  };
  for_all([&](Rank from, Rank to) { boxes.network().hold(from, to); });
  tell_failed(boxes.transport(kFailed), "its device failed");
  expect_all_know(boxes, kFailed, frozen);
  for_all([&](Rank from, Rank to) { boxes.network().release(from, to); });
  expect_all_know(boxes, kFailed, {});
}

// A rank that has lost all its neighbours gets others, and tells them what it had heard before.
TEST(Relay, TellsNewNeighboursWhatWasSaidBefore) {
  constexpr int kSize = 16, kFailed = 0;
  Mailboxes boxes(kSize);
  const auto beside = transport::neighbours(boxes.ranks(), kFailed);
  std::set<int> ended;
  for (const auto rank : beside) {  // all of which end with the word
    for (const auto to : boxes.ranks()) boxes.network().hold(rank, to);
    ended.insert(static_cast<int>(rank.value));
  }
  tell_failed(boxes.transport(kFailed), "its device failed");
  EXPECT_EQ(lost(boxes, kFailed, kFailed).cause, "its device failed");
  for (const auto rank : beside) boxes.network().kill(rank);
  for (const auto rank : beside) {
    for (const auto to : boxes.ranks()) boxes.network().release(rank, to);
  }
  expect_all_know(boxes, kFailed, ended);
}

TEST(Relay, GivesAnyRankAValueAroundThoseThatAreLost) {
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    std::mt19937_64 random(seed);
    const int size = 2 + static_cast<int>(random() % 30);
    Mailboxes boxes(size, seed);
    std::vector<int> left;
    for (int rank = 0; rank < size; ++rank) {
      if (random() % 3 > 0) {
        left.push_back(rank);
      } else {
        boxes.network().kill(Rank(rank));
      }
    }
    for (int rank = 0; rank < size; ++rank) {
      if (std::ranges::find(left, rank) != left.end()) continue;
      for (const int other : left) lost(boxes, other, rank);
    }
    for (const int from : left) {
      for (int to = 0; to < size; ++to)
        relay(boxes[from], boxes.transport(from), Rank(to), kChannel, std::int64_t{from * 100 + to});
    }
    for (const int from : left) {
      for (const int to : left) {
        EXPECT_EQ(boxes[to].receive(Rank(from), kChannel, kPatience).as<std::int64_t>(), from * 100 + to) << seed;
      }
    }
  }
}

}  // namespace
}  // namespace lamina::messaging
