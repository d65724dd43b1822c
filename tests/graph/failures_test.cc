// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <random>

#include "lamina/base/str.h"
#include "tests/graph/pretended_ranks.h"
#include "tests/message_of.h"

namespace lamina::graph::testing {
namespace {

StepOptions options_of(int seed) {
  return {.schedule = seed % 2 == 0 ? "simple" : "interleaved", .active_microbatches = 2, .microbatches = 3};
}

// Runs a step in which `happens` is called after so many actions, until it is not reached any more.
void at_every_point(int seed, const std::function<void(PretendedJob&, std::size_t rank)>& happens,
                    const std::function<void(PretendedJob&)>& then) {
  for (int point = 0;; ++point) {
    std::mt19937_64 draw(seed);
    const auto graph = NumberGraph::random(draw, 10, 2 + seed % 2);
    PretendedJob job(graph, options_of(seed));
    job.begin();
    int count = 0;
    job.actions.run(draw, [&] {
      if (count++ == point) happens(job, static_cast<std::size_t>(seed + point) % job.ranks.size());
    });
    if (count <= point) return;
    for (auto& rank : job.ranks) ASSERT_EQ(rank->open_entries(), 0) << "seed " << seed << ", point " << point;
    ASSERT_NO_FATAL_FAILURE(then(job)) << "seed " << seed << ", point " << point;
    for (auto& rank : job.ranks) rank->step()->fail_here();  // where it was over before
  }
}

TEST(Failures, AnOperationThatFailsEndsTheStepOnAllRanksAndTheNextOneWorks) {
  for (int seed = 0; seed < 40; ++seed) {
    at_every_point(
        seed, [](PretendedJob& job, std::size_t rank) { job.ranks[rank]->step()->fail_here(); },
        [&](PretendedJob& job) {
          for (auto& rank : job.ranks) {
            const auto words = message_of<base::Error>([&] { rank->end(); });
            ASSERT_NE(words.find("an operation has failed"), std::string::npos) << words;
          }
          std::mt19937_64 draw(seed + 1000);
          job.begin();
          job.actions.run(draw);
          ASSERT_EQ(job.difference(), "");
        });
  }
}

TEST(Failures, ALostRankEndsTheStepOfAllWhoNeedItAndAllLaterOnes) {
  for (int seed = 0; seed < 40; ++seed) {
    std::size_t lost = 0;
    at_every_point(
        seed,
        [&](PretendedJob& job, std::size_t rank) {
          lost = rank;
          for (std::size_t i = 0; i < job.ranks.size(); ++i) {
            if (i != rank) job.actions.push([&job, i, rank] { job.ranks[i]->lose(static_cast<int>(rank)); });
          }
          job.ranks[rank]->step()->fail(std::make_exception_ptr(base::Error("gone")), GraphStep::Tell::kNobody);
        },
        [&](PretendedJob& job) {
          const auto words = base::str("rank ", lost, " is lost: its process ended");
          const auto check = [&](int fewest) {
            int told = 0;
            for (std::size_t i = 0; i < job.ranks.size(); ++i) {
              if (i == lost || !job.ranks[i]->step()->error()) continue;  // one without has all that it needs
              ++told;
              ASSERT_NE(message_of<base::Error>([&] { job.ranks[i]->end(); }).find(words), std::string::npos);
            }
            ASSERT_GE(told, fewest);
          };
          check(0);
          for (std::size_t i = 0; i < job.ranks.size(); ++i) {
            if (job.ranks[i]->step()->error() == nullptr) job.ranks[i]->end();
            if (i != lost) job.ranks[i]->begin();
          }
          std::mt19937_64 draw(seed);
          job.actions.run(draw);
          for (auto& rank : job.ranks) ASSERT_EQ(rank->open_entries(), 0);
          check(1);
        });
  }
}

TEST(Failures, MayComeWhileManyThreadsWork) {
  for (int seed = 0; seed < 60; ++seed) {
    std::mt19937_64 draw(seed);
    const auto graph = NumberGraph::random(draw, 16, 1 + seed % 4);
    PretendedJob job(graph, options_of(seed));
    job.begin();
    job.actions.push([&] { job.ranks.back()->step()->fail_here(); });
    job.actions.run_by_threads(seed);
    for (auto& rank : job.ranks) {
      ASSERT_EQ(rank->open_entries(), 0);
      ASSERT_NE(message_of<base::Error>([&] { rank->end(); }), "nothing was thrown");
    }
  }
}

TEST(Failures, SayWhatRanMeanwhile) {
  NumberGraph graph;
  graph.operations = {{base::Partition(0), {}, {}, {true}}};
  graph.results = {{0, 0}};
  PretendedJob job(graph, {});
  job.ranks[0]->compute = [&](const Replica&, const std::function<void()>&) { job.ranks[0]->step()->fail_here(); };
  job.begin();
  std::mt19937_64 draw(0);
  job.actions.run(draw);
  EXPECT_EQ(message_of<base::Error>([&] { job.ranks[0]->end(); }),
            "step 0 of a graph: an operation has failed in forward of level 0 (operation0 to operation0) (microbatch "
            "0); its rank shows the error");
}

}  // namespace
}  // namespace lamina::graph::testing
