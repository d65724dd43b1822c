// SPDX-License-Identifier: Apache-2.0
#include "lamina/graph/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/message_of.h"

namespace lamina::graph {
namespace {

using ::testing::HasSubstr;

// Layers one after the other: each reads its variable, multiplies what came before, and adds.
struct Layers : TracedGraph {
  explicit Layers(int count) {
    for (int i = 0; i < count; ++i) {
      const auto layer = "dense_" + std::to_string(i);
      const int before = static_cast<int>(operations.size()) - 1;
      variables.push_back({layer + "/kernel", 400});
      operations.push_back({.name = layer + "/read", .variables = {i}, .layer = layer, .output_bytes = {400}});
      operations.push_back({.name = layer + "/product", .inputs = {{before + 1}}, .layer = layer, .output_bytes = {8}});
      if (i > 0) operations.back().inputs.push_back({before});
      operations.push_back({.name = layer + "/sum", .inputs = {{before + 2}}, .layer = layer, .output_bytes = {8}});
    }
  }
};

config::Config config_of(int partitions) {
  config::Config config;
  config.partitions = partitions;
  config.microbatches = 4;
  return config::with_defaults(config);
}

TEST(Placement, ACutOfEvenLayersIsEvenAndBetweenLayers) {
  const Layers layers(8);
  const auto made = place(layers, config_of(2));
  for (int i = 0; i < 24; ++i) EXPECT_EQ(made.partitions[i].value, i < 12 ? 0 : 1) << i;
  EXPECT_THAT(made.text, HasSubstr("dense_4"));
}

TEST(Placement, OperationsOfOneVariableStayTogether) {
  Layers layers(8);
  layers.operations[21].variables = {0};  // the last layer reads the first one's kernel, as tied embeddings do
  const auto made = place(layers, config_of(2));
  EXPECT_EQ(made.partitions[0], made.partitions[21]);
  EXPECT_EQ(made.partitions[0], made.partitions[23]);
}

// Two towers of a layer each behind an operation with two outputs, of which one is large.
TracedGraph towers() {
  TracedGraph graph{{{.name = "split", .output_bytes = {1000, 8}}}, {}, {}};
  for (int tower = 0; tower < 2; ++tower) {
    const auto name = "tower_" + std::to_string(tower);
    for (int i = 0; i < 4; ++i) {
      const int before = static_cast<int>(graph.operations.size()) - 1;
      graph.operations.push_back({.name = name + "/" + std::to_string(i), .inputs = {{before}}, .output_bytes = {100}});
      if (i == 0) graph.operations.back().inputs = {{0, tower}};
    }
  }
  graph.results = {{4, 0}, {8, 0}};
  return graph;
}

TEST(Placement, ACutGoesThroughTheSmallestOfTheOutputs) {
  const auto graph = towers();
  const auto made = place(graph, config_of(2));
  for (int i = 0; i < 9; ++i) EXPECT_EQ(made.partitions[i].value, i < 5 ? 0 : 1) << i;
  // The small output, and the results, which are everywhere.
  EXPECT_THAT(made.text, HasSubstr("108 B  model (itself), split, tower_0/0"));
  EXPECT_THAT(made.text, HasSubstr("100 B  tower_1/0"));
}

TEST(Placement, EachOutputThatAnotherItemReadsIsAStretch) {
  const auto tree = items(towers());
  ASSERT_EQ(tree[1].stretches.size(), 2);
  EXPECT_EQ(tree[1].stretches[0].value_bytes, 1000);
  EXPECT_EQ(tree[1].stretches[1].value_bytes, 8);
  EXPECT_EQ(tree[1].stretches[1].forward_us, 0);
  EXPECT_EQ(*tree[2].stretches[0].reads, (std::vector{plan::Read{1, 1000}}));
  EXPECT_EQ(*tree[6].stretches[0].reads, (std::vector{plan::Read{2, 8}}));
  EXPECT_EQ(tree[0].stretches.back().reads->size(), 2);
}

TEST(Placement, WhatAnOperationReadsInVainIsNamed) {
  const auto refused = [](const auto& spoil) {
    auto graph = towers();
    spoil(graph);
    return message_of<base::ConfigError>([&] { place(graph, config_of(2)); });
  };
  EXPECT_EQ(refused([](auto& graph) { graph.operations[1].inputs = {{3}}; }),
            "operation tower_0/0 reads operation tower_0/2 before it is made");
  EXPECT_EQ(refused([](auto& graph) { graph.operations[1].inputs = {{9}}; }),
            "operation tower_0/0 reads operation 9, which is not there");
  EXPECT_EQ(refused([](auto& graph) { graph.operations[1].inputs = {{0, 2}}; }),
            "operation tower_0/0 reads output 2 of operation split, which is not there");
  EXPECT_EQ(refused([](auto& graph) { graph.results = {{-1}}; }),
            "what is outside reads operation -1, which is not there");
  EXPECT_EQ(refused([](auto& graph) { graph.operations[0].output_bytes[1] = -8; }),
            "operation split has an output of -8 bytes");
  EXPECT_EQ(refused([](auto& graph) { graph.operations[0].variables = {0}; }),
            "operation split uses variable 0, which is not there");
}

TEST(Placement, AVariableThatHasAPartitionKeepsItInOtherGraphs) {
  Layers layers(8);
  for (int layer = 0; layer < 8; ++layer) layers.operations[3 * layer].placed_at = layer < 2 ? 0 : 1;
  const auto made = place(layers, config_of(2));
  for (int i = 0; i < 24; ++i) EXPECT_EQ(made.partitions[i].value, i < 6 ? 0 : 1) << i;
}

TEST(Placement, ByHandEachGoesWhereItWasPlaced) {
  Layers layers(2);
  auto config = config_of(3);
  config.auto_partition = false;
  config.default_partition = 2;
  layers.operations[1].placed_at = 0;
  layers.operations[3].placed_at = 1;
  const auto made = place(layers, config);
  std::vector<int> partitions;
  for (const auto partition : made.partitions) partitions.push_back(static_cast<int>(partition.value));
  EXPECT_EQ(partitions, (std::vector{2, 0, 2, 1, 2, 2}));
}

TEST(Placement, ByHandWhatAVariableTiesIsNamed) {
  Layers layers(2);
  auto config = config_of(2);
  config.auto_partition = false;
  layers.operations[2].variables = {0};
  layers.operations[0].placed_at = 0;
  layers.operations[2].placed_at = 1;
  EXPECT_EQ(message_of<base::ConfigError>([&] { place(layers, config); }),
            "operation dense_0/read is placed on partition 0, and dense_0/sum on 1, but both use the variable "
            "dense_0/kernel; place them on one partition");
  layers.operations[2].placed_at = 2;
  EXPECT_EQ(message_of<base::ConfigError>([&] { place(layers, config); }),
            "operation dense_0/sum is placed on partition 2 of 2");
}

}  // namespace
}  // namespace lamina::graph
