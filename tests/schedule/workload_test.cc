// SPDX-License-Identifier: Apache-2.0
#include "lamina/schedule/workload.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>

#include "lamina/schedule/simulation.h"

namespace lamina::schedule {
namespace {

Piece piece(int rank, std::int64_t forward, std::int64_t backward, int before = -1) {
  return {.work = {.rank = rank, .forward = forward, .backward = backward}, .before = before};
}

// The value of one piece is read by another.
void join(Workload& workload, int from, int to, std::int64_t time = 0) {
  workload.pieces[to].forward_needs.push_back({from, time});
  workload.pieces[from].backward_needs.push_back({to, time});
}

// The body calls a module on rank 1, goes on with work of its own, and then reads the result.
Workload beside(std::int64_t own, std::int64_t elsewhere) {
  Workload workload;
  workload.pieces = {piece(0, 0, 0), piece(1, elsewhere, 2 * elsewhere), piece(0, own, 2 * own, 0), piece(0, 5, 10, 2),
                     piece(0, 0, 0, 3)};
  join(workload, 0, 1, 3);
  join(workload, 1, 3, 3);
  return workload;
}

TEST(Workload, TwoRanksComputeOneMicrobatchAtOnceWhereTheCallerGoesOn) {
  EXPECT_EQ(step_time(*interleaved_schedule(1), beside(30, 10)), 3 * (30 + 5));
  EXPECT_EQ(step_time(*interleaved_schedule(1), beside(10, 30)), 3 * (30 + 5) + 4 * 3);
}

TEST(Workload, ACallGoesOnWithItsNextPieceWithoutAnotherTurnBetween) {
  Workload workload;
  workload.microbatches = 2;
  workload.pieces = {piece(0, 4, 0), piece(0, 4, 0, 0), piece(0, 0, 0, 1)};
  std::vector<std::pair<std::int64_t, int>> began;
  for (const Turn& turn : simulate(*interleaved_schedule(2), workload)) {
    if (turn.end > turn.start) began.emplace_back(turn.ticket.microbatch.value, turn.visit);
  }
  EXPECT_EQ(began, (std::vector<std::pair<std::int64_t, int>>{{0, 0}, {0, 1}, {1, 0}, {1, 1}}));
}

TEST(Workload, AWaitingCallGivesItsRankToOtherMicrobatches) {
  Workload workload;
  workload.microbatches = 2;
  workload.pieces = {piece(0, 4, 0), piece(1, 20, 0), piece(0, 4, 0, 0), piece(0, 0, 0, 2)};
  join(workload, 0, 1);
  join(workload, 1, 2);
  std::vector<std::pair<std::int64_t, int>> began;
  for (const Turn& turn : simulate(*interleaved_schedule(2), workload)) {
    if (turn.rank == 0 && turn.end > turn.start) began.emplace_back(turn.ticket.microbatch.value, turn.visit);
  }
  EXPECT_EQ(began, (std::vector<std::pair<std::int64_t, int>>{{0, 0}, {1, 0}, {0, 2}, {1, 2}}));
}

TEST(Workload, AStepEndsWhenBackwardsHaveEndedThatNobodyWaitsFor) {
  Workload workload;
  workload.microbatches = 2;
  workload.pieces = {piece(0, 1, 1), piece(1, 1, 50), piece(0, 0, 0, 0)};
  workload.pieces[1].forward_needs = {{0, 0}};
  workload.pieces[2].forward_needs = {{1, 0}};
  workload.pieces[1].backward_needs = {{2, 0}};
  const auto turns = simulate(*interleaved_schedule(1), workload);
  EXPECT_EQ(turns.back().end, 2 * (1 + 1 + 50));
  EXPECT_EQ(turns.back().after.finished, 2);
}

TEST(Workload, TheWeightPartsOfACallAreOneTurnAfterItsBackward) {
  Workload workload;
  workload.pieces = {piece(0, 1, 2), piece(1, 1, 20), piece(1, 1, 20, 1), piece(0, 0, 0, 0)};
  join(workload, 0, 1);
  join(workload, 2, 3);
  for (const int at : {1, 2}) workload.pieces[at].work.weights = 5;
  const auto turns = simulate(*zero_bubble_schedule(1, 2), workload);
  std::vector<std::tuple<Phase, int, std::int64_t>> of_call;
  for (const Turn& turn : turns) {
    if (turn.rank == 1) of_call.emplace_back(turn.ticket.phase, turn.visit, turn.end - turn.start);
  }
  EXPECT_EQ(of_call, (std::vector<std::tuple<Phase, int, std::int64_t>>{{Phase::kForward, 1, 1},
                                                                        {Phase::kForward, 2, 1},
                                                                        {Phase::kBackward, 2, 15},
                                                                        {Phase::kBackward, 1, 15},
                                                                        {Phase::kWeights, 1, 10}}));
}

TEST(Workload, WithJitterTurnsTakeAboutTheirTimesOnAverageAndTheSameInTheSameDraw) {
  Workload workload = workload_of(even_chain(3, 20, 1'000'000, 2'000'000));
  workload.jitter = 0.05;
  std::map<std::int64_t, double> sums;
  for (std::uint64_t draw = 0; draw < 10; ++draw) {
    workload.draw = draw;
    const auto turns = simulate(*interleaved_schedule(7), workload);
    for (const Turn& turn : turns) {
      const auto time = static_cast<double>(turn.end - turn.start);
      const bool backward = turn.ticket.phase == Phase::kBackward;
      if (time == 0) continue;
      const double whole = backward ? 2e6 : 1e6;
      EXPECT_NEAR(time, whole, 0.05 * whole);
      sums[backward] += time / whole / 600;
    }
    EXPECT_EQ(turns.back().end, step_time(*interleaved_schedule(7), workload));
  }
  for (const auto& [backward, mean] : sums) EXPECT_NEAR(mean, 1, 0.005);
}

// Pieces that read values of any earlier ones, in calls of any ranks.
Workload any_workload() {
  Workload workload;
  workload.microbatches = *rc::gen::inRange(1, 6).as("microbatches");
  std::vector<int> latest{0};  // piece of each call; the body's first
  workload.pieces.push_back(piece(0, 1, 1));
  const int size = *rc::gen::inRange(1, 12).as("pieces");
  for (int at = 1; at <= size; ++at) {
    const bool goes_on = *rc::gen::arbitrary<bool>();
    const auto call = static_cast<std::size_t>(*rc::gen::inRange(0, static_cast<int>(latest.size())));
    const int before = goes_on ? latest[call] : -1;
    const int rank = goes_on ? workload.pieces[before].work.rank : *rc::gen::inRange(0, 4);
    workload.pieces.push_back(piece(rank, *rc::gen::inRange(0, 4), *rc::gen::inRange(0, 4), before));
    workload.pieces.back().work.weights = *rc::gen::inRange<std::int64_t>(0, workload.pieces.back().work.backward + 1);
    if (!goes_on) join(workload, *rc::gen::inRange(0, at), at, *rc::gen::inRange(0, 4));
    for (int more = *rc::gen::inRange(0, 3); more > 0; --more) join(workload, *rc::gen::inRange(0, at), at, 1);
    goes_on ? static_cast<void>(latest[call] = at) : latest.push_back(at);
  }
  const int loss = size + 1;
  workload.pieces.push_back(piece(0, 0, 0, latest[0]));
  for (int at = 0; at < loss; ++at) {
    if (workload.pieces[at].backward_needs.empty()) join(workload, at, loss, 1);
  }
  return workload;
}

RC_GTEST_PROP(WorkloadProperty, EachPieceGoesForwardAndBackwardOnceAfterAllThatItNeeds, ()) {
  const Workload workload = any_workload();
  const int active = *rc::gen::inRange(1, 7).as("active microbatches");
  const auto schedule =
      make_schedule(*rc::gen::element<std::string>("simple", "interleaved", "zero_bubble"), active, 2);
  std::map<std::pair<int, std::int64_t>, std::int64_t> forwards, backwards;
  for (const Turn& turn : simulate(*schedule, workload)) {
    if (turn.ticket.phase == Phase::kWeights) continue;
    const bool back = turn.ticket.phase == Phase::kBackward || turn.ticket.phase == Phase::kBackwardStart;
    auto& ends = back ? backwards : forwards;
    const auto microbatch = turn.ticket.microbatch.value;
    RC_ASSERT((ends.try_emplace({turn.visit, microbatch}, turn.end).second));
    const Piece& own = workload.pieces[turn.visit];
    for (const Need& need : back ? own.backward_needs : own.forward_needs) {
      const bool elsewhere = workload.pieces[need.piece].work.rank != own.work.rank;
      RC_ASSERT((ends.at({need.piece, microbatch}) + (elsewhere ? need.time : 0) <= turn.start));
    }
    if (!back && own.before >= 0) RC_ASSERT((forwards.at({own.before, microbatch}) <= turn.start));
  }
  RC_ASSERT(forwards.size() == workload.pieces.size() * workload.microbatches);
  RC_ASSERT(backwards.size() == forwards.size());
}

}  // namespace
}  // namespace lamina::schedule
