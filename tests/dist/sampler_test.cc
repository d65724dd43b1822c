// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/sampler.h"

#include <gmock/gmock.h>

#include <algorithm>

#include "lamina/base/error.h"

namespace lamina::dist {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Indices = std::vector<std::size_t>;

Indices all(Sampler::Part part) {
  Indices everything;
  for (part.rank = 0; part.rank < part.num_replicas; ++part.rank) {
    const Sampler sampler(part);
    const auto mine = sampler.indices();
    EXPECT_EQ(mine.size(), sampler.size());
    everything.insert(everything.end(), mine.begin(), mine.end());
  }
  std::ranges::sort(everything);
  return everything;
}

Indices up_to(std::size_t count) {
  Indices indices(count);
  for (std::size_t i = 0; i < count; ++i) indices[i] = i;
  return indices;
}

TEST(Sampler, TheUsualOneRepeatsSamplesOrLeavesSomeOut) {
  EXPECT_THAT(Sampler({.size = 5, .num_replicas = 2, .rank = 1}).indices(), ElementsAre(1, 3, 0));
  EXPECT_THAT(Sampler({.size = 5, .num_replicas = 2, .rank = 1, .drop_last = true}).indices(), ElementsAre(1, 3));
  EXPECT_THAT(Sampler({.size = 1, .num_replicas = 3, .rank = 2}).indices(), ElementsAre(0));
}

TEST(Sampler, AnExactOneGivesEachSampleOnce) {
  for (int replicas = 1; replicas <= 5; ++replicas) {
    for (std::int64_t size = replicas; size <= 12; ++size) {
      for (bool shuffle : {false, true}) {
        const auto count = static_cast<std::size_t>(size);
        EXPECT_EQ(all({.size = size, .num_replicas = replicas, .shuffle = shuffle, .exact = true}), up_to(count));
        const auto kept = all({.size = size, .num_replicas = replicas, .drop_last = true, .exact = true});
        EXPECT_EQ(kept, up_to(count - count % static_cast<std::size_t>(replicas)));
      }
    }
  }
}

// Samples that Python's torch.utils.data.DistributedSampler and lamina.dist.ExactSampler give:
// tests/python/dist/test_sampler.py holds the same numbers.
TEST(Sampler, ShufflesAsPythonDoes) {
  Sampler usual({.size = 7, .num_replicas = 2, .rank = 1, .shuffle = true, .seed = 3});
  usual.set_epoch(2);
  EXPECT_THAT(usual.indices(), ElementsAre(0, 2, 5, 1));
  Sampler exact({.size = 7, .num_replicas = 2, .rank = 1, .shuffle = true, .seed = 3, .exact = true});
  exact.set_epoch(2);
  EXPECT_THAT(exact.indices(), ElementsAre(0, 2, 5));
}

TEST(Sampler, GivesBatchesUntilTheEpochEndsAndBeginsAgain) {
  Sampler sampler({.size = 5});
  for (int epoch = 0; epoch < 2; ++epoch) {
    sampler.reset();
    EXPECT_EQ(sampler.next(3), (Indices{0, 1, 2}));
    EXPECT_EQ(sampler.next(3), (Indices{3, 4}));
    EXPECT_EQ(sampler.next(3), std::nullopt);
  }
}

TEST(Sampler, WeightsMakeTheAverageOverRanksThatOverSamples) {
  constexpr std::size_t kBatch = 2;
  for (std::int64_t size = 3; size <= 14; ++size) {
    double sum = 0;
    std::size_t batches = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const Sampler sampler({.size = size, .num_replicas = 3, .rank = rank, .exact = true});
      const auto weights = sampler.batch_weights(kBatch);
      if (rank == 0) batches = weights.size();
      EXPECT_EQ(weights.size(), batches) << "equally many on all ranks";
      const double last = weights.back();
      EXPECT_TRUE(std::all_of(weights.begin(), weights.end() - 1, [](double weight) { return weight == 1; }));
      sum += last;
    }
    EXPECT_NEAR(sum, 3, 1e-12);
  }
}

TEST(Sampler, RefusesWhatCannotBeSplit) {
  const auto message = [](const Sampler::Part& part) -> std::string {
    try {
      const Sampler sampler(part);
      return "none";
    } catch (const base::ConfigError& error) {
      return error.what();
    }
  };
  EXPECT_THAT(message({.size = 2, .num_replicas = 3, .exact = true}), HasSubstr("2 samples cannot be split over 3"));
  EXPECT_THAT(message({.size = 0}), HasSubstr("a sampler of 0 samples"));
  EXPECT_THAT(message({.size = 4, .num_replicas = 2, .rank = 2}), HasSubstr("rank 2 is none of 2"));
}

}  // namespace
}  // namespace lamina::dist
