// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <random>

#include "tests/graph/pretended_ranks.h"

namespace lamina::graph::testing {
namespace {

StepOptions drawn(std::mt19937_64& draw) {
  StepOptions options;
  options.schedule = draw() % 2 == 0 ? "simple" : "interleaved";
  options.active_microbatches = 1 + static_cast<int>(draw() % 6);
  options.microbatches = 1 + static_cast<int>(draw() % 6);
  options.backward = draw() % 4 != 0;
  return options;
}

TEST(Orders, EveryOneGivesWhatOneRankComputes) {
  for (int seed = 0; seed < 3000; ++seed) {
    std::mt19937_64 draw(seed);
    const auto graph = NumberGraph::random(draw, 16, 1 + seed % 4);
    PretendedJob job(graph, drawn(draw));
    for (int step = 0; step < 2; ++step) {
      job.begin();
      job.actions.run(draw);
      ASSERT_EQ(job.difference(), "") << "seed " << seed << ", step " << step;
      for (auto& rank : job.ranks) rank->end();
    }
  }
}

// A rank that is ahead sends values of a step that the others have not entered.
TEST(Orders, ARankThatIsAheadWaitsInTheNextStep) {
  for (int seed = 0; seed < 300; ++seed) {
    std::mt19937_64 draw(seed);
    const auto graph = NumberGraph::random(draw, 12, 3);
    auto options = drawn(draw);
    options.backward = false;
    PretendedJob job(graph, options);
    const auto behind = draw() % 3;
    for (std::size_t i = 0; i < 3; ++i) {
      if (i != behind) job.ranks[i]->begin();
    }
    job.actions.run(draw);
    job.ranks[behind]->begin();
    job.actions.run(draw);
    ASSERT_EQ(job.difference(), "") << "seed " << seed;
    for (auto& rank : job.ranks) rank->end();
  }
}

TEST(Orders, ManyThreadsMayTakePart) {
  for (int seed = 0; seed < 60; ++seed) {
    std::mt19937_64 draw(seed);
    const auto graph = NumberGraph::random(draw, 16, 1 + seed % 4);
    PretendedJob job(graph, drawn(draw));
    job.begin();
    job.actions.run_by_threads(seed);
    ASSERT_EQ(job.difference(), "") << "seed " << seed;
    for (auto& rank : job.ranks) rank->end();
  }
}

}  // namespace
}  // namespace lamina::graph::testing
