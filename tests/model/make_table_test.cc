// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/make_table.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "lamina/layout/place.h"

namespace lamina::model {
namespace {

using topology::Topology;

// The table of these, in one partition of a job of four replicas.
ParameterTable table_of(const std::vector<NamedTensor>& tensors, const config::Config& config) {
  const Topology topology(4, 1, 1, "cluster", {.shard = config.sharded_data_parallel_degree});
  ModuleTree tree;
  tree.add({.path = "", .id = 1});
  return make_table(topology, config, Cut(tree, {0}, {}, base::Partition(0)), tensors);
}

at::Tensor half(at::IntArrayRef sizes) { return at::zeros(sizes, at::kBFloat16); }

TEST(MakeTable, SaysThatParametersAreUpdatedAsTheyAreWhereNothingIsConfigured) {
  const auto table = table_of({{"w", at::zeros({4, 2})}, {"b", at::zeros({3}), true}}, {});
  for (const auto& row : table.all()) {
    EXPECT_FALSE(row.has_master() || row.is_divided());
    EXPECT_EQ(row.update, row.layout);
    EXPECT_EQ(row.reduction.divisor, 4);
  }
  EXPECT_TRUE(table.all()[1].layout.buffer);
}

TEST(MakeTable, GivesMastersToHalvesAlone) {
  const auto table = table_of({{"w", half({4})}, {"exact", at::zeros({4})}}, {.bf16 = true});
  EXPECT_TRUE(table.all()[0].has_master());
  EXPECT_EQ(table.all()[0].update.dtype, layout::DType::kFloat32);
  EXPECT_FALSE(table.all()[1].has_master());
}

TEST(MakeTable, SharesOutLargeParametersThatLieAloneAndTheirUpdatesAlike) {
  const auto memory = at::zeros({8});
  const auto table = table_of({{"w", half({4, 2})},
                               {"small", at::zeros({2})},
                               {"scalar", at::zeros({})},
                               {"view", memory.narrow(0, 0, 4)},
                               {"tied", memory.narrow(0, 2, 4)},
                               {"buffer", at::zeros({8}), true}},
                              {.bf16 = true, .sharded_data_parallel_degree = 2, .sdp_param_persistence_threshold = 4});
  for (const auto& row : table.all()) {
    EXPECT_EQ(row.layout.shards, row.layout.name == "w" ? 2 : 1) << row.layout.name;
    EXPECT_EQ(row.update.shards, row.layout.shards) << row.layout.name;
  }
  EXPECT_TRUE(table.all()[0].has_master());
}

TEST(MakeTable, DividesUpdatesOverTheCopiesOfWhatStaysWhole) {
  const auto memory = at::zeros({8});
  const config::Config config{.shard_optimizer_state = true};
  const auto table = table_of({{"w", at::zeros({3, 2})},
                               {"scalar", at::zeros({})},
                               {"empty", at::zeros({0})},
                               {"view", memory.narrow(0, 0, 4)},
                               {"tied", memory.narrow(0, 2, 4)}},
                              config);
  for (const auto& row : table.all()) {
    EXPECT_EQ(row.layout.shards, 1) << row.layout.name;
    EXPECT_EQ(row.is_divided(), row.layout.name == "w") << row.layout.name;
  }
  const auto last = layout::held(table.all()[0].update, Topology(4, 1, 1), {.rdp = 3});
  EXPECT_EQ(last->begin, 6);
  EXPECT_EQ(last->end, 6);
  EXPECT_EQ(last->size, 2);
}

TEST(MakeTable, DividesNothingWhereNobodyHasTheSame) {
  const config::Config config{.shard_optimizer_state = true};
  EXPECT_EQ(updates_divided_over(Topology(2, 2, 1), config), std::nullopt);
  EXPECT_EQ(updates_divided_over(Topology(2, 1, 1), config), topology::kSameParts);
  EXPECT_EQ(updates_divided_over(Topology(2, 1, 1, "cluster", {.shard = 2}), {.sharded_data_parallel_degree = 2}),
            topology::Group::kShard);
}

}  // namespace
}  // namespace lamina::model
