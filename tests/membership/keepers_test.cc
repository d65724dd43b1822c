// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/keepers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <tuple>

namespace lamina::membership {
namespace {

using Keepers = std::vector<std::optional<int>>;

std::vector<int> one_machine(std::size_t ranks) { return std::vector<int>(ranks, 0); }

TEST(Keepers, TheNextRankKeepsWhatNobodyElseHas) {
  EXPECT_EQ(keepers_of({1, 2, 3}, one_machine(3)), (Keepers{1, 2, 0}));
}

TEST(Keepers, NobodyKeepsWhatAnotherHasToo) {
  EXPECT_EQ(keepers_of({1, 2, 1, 2}, one_machine(4)), Keepers(4));
  EXPECT_EQ(keepers_of({1, 2, 1, 3}, one_machine(4)), (Keepers{{}, 2, {}, 0}));
}

TEST(Keepers, AKeeperIsOnTheNextMachine) {
  EXPECT_EQ(keepers_of({1, 2, 3, 4, 5}, {0, 0, 0, 3, 3}), (Keepers{3, 4, 3, 0, 1}));
}

TEST(Keepers, TheSameOnOneMachineIsLostWithIt) {
  EXPECT_EQ(keepers_of({1, 1, 2, 2}, {0, 0, 1, 1}), (Keepers{2, 3, 0, 1}));
  EXPECT_EQ(keepers_of({1, 2, 1, 2}, {0, 0, 1, 1}), Keepers(4));
}

TEST(Keepers, ASingleRankHasNone) { EXPECT_EQ(keepers_of({1}, {0}), Keepers(1)); }

const KeptVersion kSix{0, 6}, kSeven{0, 7};

TEST(NewestWhole, IsTheNewestThatAllHaveAndWhoseLostPartsAreKept) {
  const std::map<KeptVersion, Holdings> holdings{{kSix, {1, 2, 3}}, {kSeven, {1, 2, 3}}};
  // Rank 1 is lost, and rank 2 keeps what it had.
  EXPECT_EQ(newest_whole({{{{kSix, 0, {2}}, {kSeven, 0, {}}}}, {{{kSix, 2, {1}}, {kSeven, 2, {1}}}}}, holdings).version,
            kSeven);
  EXPECT_EQ(newest_whole({{{{kSix, 0, {2}}, {kSeven, 0, {}}}}, {{{kSix, 2, {1}}, {kSeven, 2, {}}}}}, holdings).version,
            kSix);
  EXPECT_EQ(newest_whole({{{{kSix, 0, {2}}, {kSeven, 0, {}}}}, {{{kSix, 2, {1}}}}}, holdings).version, kSix);
}

TEST(NewestWhole, WhoHasTheSameSpeaksForALostRank) {
  const std::map<KeptVersion, Holdings> holdings{{kSix, {1, 2, 1, 2}}};
  EXPECT_EQ(newest_whole({{{{kSix, 0, {}}}}, {{{kSix, 1, {}}}}}, holdings).version, kSix);
  const auto none = newest_whole({{{{kSix, 0, {}}}}, {{{kSix, 2, {}}}}}, holdings);
  EXPECT_FALSE(none.version);
  EXPECT_EQ(none.why_not, "what ranks 1, 3 of 4 had is lost with whoever kept it");
}

TEST(NewestWhole, TheVersionOfALaterEpochIsNewerWhateverItsUpdates) {
  const KeptVersion later{1, 5};
  const std::map<KeptVersion, Holdings> holdings{{kSix, {1, 2, 3}}, {later, {1, 2}}};
  EXPECT_EQ(newest_whole({{{{kSix, 0, {2, 1}}, {later, 0, {1}}}}}, holdings).version, later);
}

TEST(NewestWhole, SaysThatNothingWasKeptYet) {
  EXPECT_EQ(newest_whole({KeptBy(), KeptBy()}, {}).why_not, "no version that all of them have was kept yet");
}

TEST(NewestWhole, NobodyWaitsForPartsOfAVersionWithWhichARankHasCome) {
  const KeptVersion joined{1, 7};
  const std::map<KeptVersion, Holdings> holdings{{kSeven, {1, 2}}, {joined, {1, 2, 3}}};
  const KeptBy first{{{kSeven, 0, {1}}, {joined, 0, {}}}}, second{{{kSeven, 1, {0}}, {joined, 1, {}}}};
  EXPECT_EQ(newest_whole({first, second, {{{joined, 2, {}}}, kSeven}}, holdings).version, joined);
  EXPECT_EQ(newest_whole({first, second}, holdings).version, kSeven) << "the newcomer is lost";
  EXPECT_EQ(newest_whole({first, second, {{}, kSeven}}, holdings).version, kSeven) << "it has kept nothing yet";
  EXPECT_EQ(newest_whole({first, {{{joined, 2, {}}}, kSeven}}, holdings).version, kSeven) << "the second is lost";
  EXPECT_EQ(newest_whole({first, {{}, kLaterThanAll}}, holdings).version, kSeven) << "with a newcomer that has nothing";
}

TEST(MayLeave, WhoTakesNothingWithItThatNobodyElseHas) {
  const std::map<KeptVersion, Holdings> holdings{{kSix, {1, 2, 3}}};
  const std::vector<KeptBy> told{{{{kSix, 0, {2}}}}, {{{kSix, 1, {0}}}}, {{{kSix, 2, {1}}}}};
  const auto may = [&](const std::vector<bool>& want) { return may_leave(told, want, holdings); };
  EXPECT_EQ(may({false, true, false}), (std::vector<bool>{false, true, false}));
  EXPECT_EQ(may({true, true, false}), (std::vector<bool>{true, false, false})) << "1 keeps what 0 has";
  EXPECT_EQ(may({true, false, true}), (std::vector<bool>{true, false, false})) << "0 keeps what 2 has";
  EXPECT_EQ(may({true, true, true}), (std::vector<bool>{true, true, true})) << "nobody goes on";
  EXPECT_EQ(may({false, false, false}), (std::vector<bool>{false, false, false}));
}

// Ranks keep as [Note: kept states] says, with messages that are late, and a single one is lost at any moment. There is
// a version that is whole, and no older than the one before the last that any rank has.
TEST(NewestWhole, IsThereWhereverOneRankIsLost) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const auto upto = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
    const int size = 2 + upto(4);
    Holdings holdings;
    for (int rank = 0; rank < size; ++rank) holdings.push_back(static_cast<std::uint64_t>(upto(size)));
    const auto keepers = keepers_of(holdings, one_machine(holdings.size()));
    std::vector<std::set<int>> own(size);
    std::vector<std::vector<std::set<int>>> arrived(size, std::vector<std::set<int>>(size));  // at, from
    std::vector<int> entered(size, -1), left(size, -1), begun(size, -1);
    std::vector<std::tuple<int, int, int>> on_their_way;
    for (int moments = upto(200); moments > 0; --moments) {
      if (!on_their_way.empty() && upto(2) == 0) {
        const auto which = on_their_way.begin() + upto(static_cast<int>(on_their_way.size()));
        const auto [from, to, version] = *which;
        if (version == 0 || arrived[to][from].contains(version - 1)) {
          arrived[to][from].insert(version);
          on_their_way.erase(which);
        }
        continue;
      }
      const int rank = upto(size), next = begun[rank] + 1;
      if (entered[rank] < next) {
        bool has_all = true;
        for (int ward = 0; ward < size; ++ward) {
          if (keepers[ward] == rank && next > 0) has_all = has_all && arrived[rank][ward].contains(next - 1);
        }
        if (has_all) entered[rank] = next;
      } else if (left[rank] < next) {
        if (std::ranges::all_of(entered, [&](int each) { return each >= next; })) left[rank] = next;
      } else {
        begun[rank] = next;
        own[rank].insert(next);
        own[rank].erase(next - 2);
        for (auto& of : arrived[rank]) of.erase(next - 2);
        if (keepers[rank]) on_their_way.emplace_back(rank, *keepers[rank], next);
      }
    }
    const int victim = upto(size), latest = *std::ranges::max_element(begun);
    std::vector<KeptBy> told;
    std::map<KeptVersion, Holdings> known;
    for (int rank = 0; rank < size; ++rank) {
      if (rank == victim) continue;
      auto& here = told.emplace_back().versions;
      for (const int version : own[rank]) {
        auto& word = here.emplace_back(KeptHere{{0, version}, rank, {}});
        for (int of = 0; of < size; ++of) {
          if (arrived[rank][of].contains(version)) word.others.push_back(of);
        }
        known[{0, version}] = holdings;
      }
    }
    const auto found = newest_whole(told, known);
    if (latest < 1) continue;  // the first one may not be everywhere
    ASSERT_TRUE(found.version) << seed << ": " << found.why_not;
    EXPECT_GE(found.version->updates, latest - 1) << seed;
  }
}

}  // namespace
}  // namespace lamina::membership
