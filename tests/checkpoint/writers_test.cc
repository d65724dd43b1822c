// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/writers.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "lamina/layout/place.h"

namespace lamina::checkpoint {
namespace {

using topology::Topology;

model::ParameterTable table_of(const std::vector<std::int64_t>& sizes, int shards, bool buffer) {
  std::vector<model::Parameter> rows;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    rows.push_back(model::whole_in(base::Partition(0), "p" + std::to_string(i), at::zeros({sizes[i]}), false, 1));
    rows.back().layout.shards = shards;
  }
  if (buffer) rows.push_back(model::whole_in(base::Partition(0), "buffer", at::zeros({1000}), true, 1));
  return {std::move(rows), base::Partition(0), 1};
}

// The elements that each rank writes.
std::map<std::int64_t, std::int64_t> written(const model::ParameterTable& table, const Topology& topology, int ranks) {
  const Writers writers(table, topology);
  std::map<std::int64_t, std::int64_t> elements;
  for (int rank = 0; rank < ranks; ++rank) {
    elements[rank] = 0;
    for (const auto& row : table.all()) {
      const auto place = layout::place(row.layout, topology, topology.coordinates(base::Rank(rank)));
      if (!place || place->copy != writers.copy_of(row.layout, topology)) continue;
      const auto region = layout::held(row.layout, place->slice, place->shard);
      elements[rank] += region.end - region.begin;
    }
  }
  return elements;
}

TEST(Writers, WriteEachElementOnceAndAboutAsMuchAsOthers) {
  for (const int shards : {1, 2, 4}) {
    const auto table = table_of({64, 8, 8, 8, 8, 8, 8, 16, 32, 32}, shards, false);
    std::int64_t sum = 0;
    for (const auto& [rank, elements] : written(table, Topology(4, 1, 1, "cluster", {.shard = shards}), 4)) {
      sum += elements;
      EXPECT_LE(elements, 64) << "rank " << rank << ", " << shards << " shards";
    }
    EXPECT_EQ(sum, 192);
  }
}

TEST(Writers, LeaveBuffersToTheFirstCopy) {
  const auto found = written(table_of({1}, 1, true), Topology(4, 1, 1), 4);
  EXPECT_GE(found.at(0), 1000);
}

}  // namespace
}  // namespace lamina::checkpoint
