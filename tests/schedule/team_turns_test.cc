// SPDX-License-Identifier: Apache-2.0
#include "lamina/schedule/team_turns.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "lamina/base/str.h"
#include "tests/schedule/team_simulation.h"
#include "tests/soak.h"

namespace lamina::schedule {
namespace {

int seeds() { return lamina::test::in_a_soak(10000, 600); }

struct Range {
  int least, most;
  int at(int seed) const { return least + seed % (most - least + 1); }
  int size() const { return most - least + 1; }
};

// The share of steps that hang, of programs and layouts drawn by chance.
double share_that_hangs(Order order, Range partitions, Range members) {
  int hang = 0;
  for (int seed = 0; seed < seeds(); ++seed) {
    const auto layout = any_layout(partitions.at(seed), members.at(seed / partitions.size()), seed);
    if (!step_ends(layout, order, seed)) ++hang;
  }
  return static_cast<double>(hang) / seeds();
}

TEST(TeamsOfASimulation, HangMostlyWhereEachMemberDecidesForItself) {
  EXPECT_GT(share_that_hangs(Order::kFree, {2, 4}, {2, 4}), 0.9);
}

TEST(TeamsOfASimulation, HangOftenWhereAThreadKeepsItsTurnForAValueThatIsThere) {
  EXPECT_GT(share_that_hangs(Order::kReadsMayGoOn, {2, 4}, {2, 4}), 0.4);
}

TEST(TeamsOfASimulation, NeverHangInTheOrderOfAnyMember) {
  for (int seed = 0; seed < seeds(); ++seed) {
    const auto layout = any_layout(1 + seed % 4, 2 + seed / 4 % 3, seed);
    ASSERT_TRUE(step_ends(layout, Order::kOfTheFirst, seed)) << layout << ", seed " << seed;
  }
}

TEST(TeamsOfASimulation, NeedNoWordWithOnePartition) { EXPECT_EQ(share_that_hangs(Order::kFree, {1, 1}, {2, 4}), 0); }

TEST(TeamsOfASimulation, OfOneRankNeverHang) { EXPECT_EQ(share_that_hangs(Order::kFree, {1, 4}, {1, 1}), 0); }

// A slot of a member, without threads.
struct Slot {
  TeamTurns turns;
  std::vector<Ticket> tickets;
  std::vector<TurnName> names;

  void want(std::int64_t call, std::int64_t turn = 0) {
    tickets.push_back({Phase::kForward, base::Microbatch(0), tickets.size()});
    names.push_back({base::Microbatch(0), base::Partition(0), call, turn});
  }
  // The call that goes on; -1: none.
  std::int64_t pick() {
    const auto chosen = turns.pick(tickets, names, {});
    if (!chosen) return -1;
    const auto call = names[*chosen].call;
    tickets.erase(tickets.begin() + static_cast<std::ptrdiff_t>(*chosen));
    names.erase(names.begin() + static_cast<std::ptrdiff_t>(*chosen));
    return call;
  }
  void hear(std::vector<Pick> words) {
    for (auto& word : words) turns.hear(std::move(word));
  }
};

Slot first_member() { return {TeamTurns::of_first(interleaved_schedule(4))}; }
Slot another_member() { return {TeamTurns::of_another()}; }

TEST(TeamTurns, OfAnotherMemberAreThoseOfTheFirst) {
  auto first = first_member(), other = another_member();
  for (const std::int64_t call : {3, 1, 2}) first.want(call);
  for (const std::int64_t call : {1, 2, 3}) other.want(call);
  EXPECT_EQ(other.pick(), -1);
  for (const std::int64_t call : {3, 1, 2}) {
    EXPECT_EQ(first.pick(), call);
    other.hear(first.turns.take_words());
    EXPECT_EQ(other.pick(), call);
  }
}

TEST(TeamTurns, KeepTheirOrderWhereWordsOvertakeEachOther) {
  auto first = first_member(), other = another_member();
  for (const std::int64_t call : {1, 2}) first.want(call), other.want(call);
  first.pick(), first.pick();
  auto words = first.turns.take_words();
  other.hear({words.at(1)});
  EXPECT_EQ(other.pick(), -1);
  other.hear({words.at(0)});
  EXPECT_EQ(other.pick(), 1);
  EXPECT_EQ(other.pick(), 2);
}

TEST(TeamTurns, WaitForTheOneThatIsNextAndSayWhichThatIs) {
  auto first = first_member(), other = another_member();
  first.want(7, 2), other.want(8);
  first.pick();
  other.hear(first.turns.take_words());
  EXPECT_EQ(other.pick(), -1);
  EXPECT_EQ(base::str(other.turns.awaited().value()), "turn 2 of call 7 of partition 0 (microbatch 0)");
  other.want(7, 1);
  EXPECT_EQ(other.pick(), -1);
  other.want(7, 2);
  EXPECT_EQ(other.pick(), 7);
  EXPECT_FALSE(other.turns.awaited());
}

// Both members are in the first of two turns.
std::pair<Slot, Slot> both_in_a_turn() {
  auto first = first_member(), other = another_member();
  for (const std::int64_t call : {1, 2}) first.want(call), other.want(call);
  first.pick();
  other.hear(first.turns.take_words());
  other.pick();
  return {std::move(first), std::move(other)};
}

TEST(TeamTurns, OfMembersThatMadeOtherCallsAreGrantedNoMore) {
  auto [first, other] = both_in_a_turn();
  for (auto* member : {&first, &other}) member->turns.note(TurnAct::kCollective, "all-reduce in h.3");
  first.turns.note(TurnAct::kCall, "forward of h.4");
  other.turns.note(TurnAct::kCall, "forward of h.5");
  first.pick();
  other.hear(first.turns.take_words());
  EXPECT_FALSE(other.turns.parting());  // it may do as much yet
  EXPECT_EQ(other.pick(), -1);
  ASSERT_TRUE(other.turns.parting());
  EXPECT_EQ(other.turns.parting()->what(),
            "in turn 0 of call 1 of partition 0 (microbatch 0) the first rank of the team made 2 calls or "
            "collectives, the last forward of h.4, this one made 2 calls or collectives, the last forward of h.5");
}

TEST(TeamTurns, OfAMemberThatBeginsACollectiveAfterTheFirstHasGoneOnAreFoundAtOnce) {
  auto [first, other] = both_in_a_turn();
  first.pick();
  other.hear(first.turns.take_words());
  EXPECT_FALSE(other.turns.parting());
  other.turns.note(TurnAct::kCollective, "all-reduce in h.3");
  EXPECT_TRUE(other.turns.parting());
}

TEST(TeamTurns, OfAMemberThatWaitsInACollectiveAreFoundWhenTheFirstGoesOn) {
  auto [first, other] = both_in_a_turn();
  other.turns.note(TurnAct::kCollective, "all-reduce in h.3");
  EXPECT_FALSE(other.turns.parting());
  first.pick();
  other.hear(first.turns.take_words());
  EXPECT_TRUE(other.turns.parting());
}

TEST(TeamTurns, OfAMemberThatLacksTheCollectiveInWhichTheFirstWaitsAreFoundWhenThatSaysSo) {
  auto [first, other] = both_in_a_turn();
  first.turns.note(TurnAct::kCollective, "all-reduce in h.3");
  first.turns.note_long_wait();
  for (const auto* call : {"forward of h.4", "forward of h.5"}) other.turns.note(TurnAct::kCall, call);
  other.hear(first.turns.take_words());
  EXPECT_FALSE(other.turns.parting());  // it may begin that one yet
  EXPECT_EQ(other.pick(), -1);
  EXPECT_TRUE(other.turns.parting());
}

TEST(TeamTurns, OfAMemberThatHasBegunAllCollectivesAreNotPartedWhereTheFirstWaitsForAThird) {
  auto [first, other] = both_in_a_turn();
  for (auto* member : {&first, &other}) member->turns.note(TurnAct::kCollective, "all-reduce in h.3");
  EXPECT_EQ(other.pick(), -1);
  first.turns.note_long_wait();
  other.hear(first.turns.take_words());
  EXPECT_FALSE(other.turns.parting());
  first.pick();
  other.hear(first.turns.take_words());
  EXPECT_EQ(other.pick(), 2);
}

TEST(TeamTurns, SayHowTheLastOneEndedWhereNobodyIsNext) {
  auto first = first_member(), other = another_member();
  first.want(1), other.want(1);
  first.pick(), other.hear(first.turns.take_words()), other.pick();
  other.turns.note(TurnAct::kCall, "forward of h.5");
  EXPECT_EQ(first.pick(), -1);
  EXPECT_EQ(first.pick(), -1);
  const auto words = first.turns.take_words();
  EXPECT_EQ(words.size(), 1);
  other.hear(words);
  EXPECT_TRUE(other.turns.parting());
}

}  // namespace
}  // namespace lamina::schedule
