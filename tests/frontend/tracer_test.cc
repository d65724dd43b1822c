// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/tracer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include "lamina/plan/even_split.h"
#include "lamina/plan/plan_from_config.h"
#include "lamina/plan/prediction.h"
#include "lamina/plan/settle.h"
#include "tests/frontend/models.h"

namespace lamina::frontend::test {
namespace {

// Declared in another order than called; the root reads the table's parameter, and one child draws.
struct SampleImpl : torch::nn::Module {
  Child<torch::nn::Linear> last, first, never;
  Child<torch::nn::Embedding> table;
  Child<torch::nn::BatchNorm1d> norm;
  Child<torch::nn::Dropout> drop;
  torch::nn::Linear plain{nullptr};
  SampleImpl() {
    last = register_module("last", torch::nn::Linear(4, 2));
    never = register_module("never", torch::nn::Linear(4, 4));
    first = register_module("first", torch::nn::Linear(4, 4));
    table = register_module("table", torch::nn::Embedding(4, 2));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    drop = register_module("drop", torch::nn::Dropout(0.5));
    plain = register_module("plain", torch::nn::Linear(4, 4));
  }
  Tensor forward(const Tensor& x) { return torch::linear(last(drop(norm(first(plain(x))))), table->weight); }
};

struct Traced {
  std::shared_ptr<SampleImpl> root = std::make_shared<SampleImpl>();
  TorchModuleTree tree{root, true};
  Example example{CallKind<SampleImpl, Tensor>::number, value::Tuple{{torch::ones({8, 4})}}};
  int node(const std::string& name) const {
    for (int i = 0; i < tree.size(); ++i) {
      if (tree.nodes()[i].name == name) return i;
    }
    return -1;
  }
};

TEST(TorchModuleTree, HasAsNodesTheRootAndWhatIsCalledAsAChild) {
  const Traced traced;
  EXPECT_EQ(traced.tree.size(), 7);
  EXPECT_EQ(traced.node("plain"), -1);
  for (const auto& held : traced.tree.parameters()) {
    const auto owner = held.name.starts_with("plain") ? "" : held.name.substr(0, held.name.find('.'));
    EXPECT_EQ(held.node, traced.node(owner)) << held.name;
  }
}

TEST(Trace, FindsTheOrderOfCallsWhatTheyReturnAndWhoReadsWhoseParameters) {
  const Traced traced;
  const auto costs = trace(traced.tree, traced.example);
  const auto cost = [&](const char* name) { return costs.at(traced.node(name)); };
  EXPECT_LT(cost("first").order, cost("norm").order);
  EXPECT_LT(cost("drop").order, cost("last").order);
  EXPECT_FALSE(cost("never").order);
  EXPECT_EQ(cost("first").output_bytes, 8 * 4 * 4);
  EXPECT_EQ(cost("last").output_bytes, 8 * 2 * 4);
  EXPECT_EQ(cost("first").activation_bytes, 8 * 4 * 4);
  EXPECT_EQ(costs[0].reads, std::set<int>{traced.node("table")});
  EXPECT_TRUE(cost("last").reads.empty());
  EXPECT_GT(cost("first").forward_us, 0);
}

// Values go from the stretch that makes them to all that read them, past those between.
struct SkipImpl : torch::nn::Module {
  Child<torch::nn::Linear> first, second;
  Child<torch::nn::Identity> same;
  SkipImpl() {
    first = register_module("first", torch::nn::Linear(4, 4));
    same = register_module("same", torch::nn::Identity());
    second = register_module("second", torch::nn::Linear(4, 4));
  }
  Tensor forward(const Tensor& x) {
    const auto skip = first(x);
    return second(same(skip)) + skip;
  }
};

TEST(Trace, FindsTheValuesThatStretchesReadAndTheirWeightParts) {
  const auto root = std::make_shared<SkipImpl>();
  const TorchModuleTree tree(root, true);
  const Example example{CallKind<SkipImpl, Tensor>::number, value::Tuple{{torch::ones({8, 4})}}};
  const auto [rows, nodes] = model::plan_rows(tree, trace(tree, example));
  const auto& own = rows[0].stretches;
  const auto only = [&](int row) { return rows[row].stretches.at(0); };
  constexpr std::int64_t kBytes = 8 * 4 * 4;
  using Reads = std::vector<plan::Read>;
  EXPECT_EQ(only(1).reads, Reads());
  EXPECT_EQ(only(2).reads, (Reads{{only(1).at, kBytes}}));
  EXPECT_EQ(only(3).reads, (Reads{{only(1).at, kBytes}})) << "`same` hands on what it gets";
  EXPECT_EQ(own.back().reads, (Reads{{only(3).at, kBytes}, {only(1).at, kBytes}}));
  EXPECT_GT(only(1).weights_us, 0);
  EXPECT_LE(only(1).weights_us, only(1).backward_us);
  EXPECT_EQ(own.back().weights_us, 0);
}

TEST(Trace, LeavesBuffersArgumentsAndRandomNumbersAsTheyWere) {
  const Traced traced;
  torch::manual_seed(3);
  const auto expected = torch::rand({4});
  torch::manual_seed(3);
  trace(traced.tree, traced.example);
  EXPECT_TRUE(torch::rand({4}).equal(expected));
  EXPECT_TRUE(traced.root->norm->running_mean.equal(torch::zeros({4})));
  EXPECT_EQ(traced.root->norm->num_batches_tracked.item<std::int64_t>(), 0);
  for (const auto& parameter : traced.root->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(Trace, ThrowsWhatTheModelThrowsAndLeavesItsCallsAsTheyWere) {
  Traced traced;
  traced.example.arguments = value::Tuple{{torch::ones({8, 5})}};
  EXPECT_THROW(trace(traced.tree, traced.example), c10::Error);
  EXPECT_EQ(router(), nullptr);
  EXPECT_EQ(traced.root->forward(torch::ones({8, 4})).size(0), 8);
}

TEST(PlannedTree, HasChildrenInTheOrderOfTheirCallsAndTiesReadersToWhatTheyRead) {
  const Traced traced;
  const auto [rows, nodes] = model::plan_rows(traced.tree, trace(traced.tree, traced.example));
  std::vector<std::string> names;
  for (const auto& row : rows) names.push_back(row.name);
  EXPECT_EQ(names, (std::vector<std::string>{"", "first", "norm", "drop", "last", "never", "table"}));
  EXPECT_EQ(rows[0].together, std::vector{6});
  EXPECT_EQ(nodes[6], traced.node("table"));
  EXPECT_EQ(rows[0].parameter_bytes, (4 * 4 + 4) * 4);  // of what is plain
  EXPECT_EQ(rows[1].backward_us, 2 * rows[1].forward_us);
}

// A flat chain with one activation for all layers, or with one for each.
struct FlatImpl : torch::nn::Module {
  Sequential layers{nullptr};
  explicit FlatImpl(bool one_activation) {
    torch::nn::ReLU shared;
    layers = register_module("layers", Sequential());
    for (int i = 0; i < 8; ++i) {
      layers->push_back(torch::nn::Linear(64, 64));
      layers->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})));
      layers->push_back(one_activation ? shared : torch::nn::ReLU());
    }
  }
  // Layers drawn at random, of which so many per cent have parameters.
  FlatImpl(std::mt19937& draw, int with_parameters) {
    layers = register_module("layers", Sequential());
    for (auto size = 1 + draw() % 20; size > 0; --size) {
      const auto kind = draw() % 3;
      if (static_cast<int>(draw() % 100) >= with_parameters) {
        kind == 0 ? layers->push_back(torch::nn::Tanh()) : layers->push_back(torch::nn::Dropout(0.5));
      } else if (kind == 0) {
        layers->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})));
      } else {
        layers->push_back(torch::nn::Linear(64, 64));
      }
    }
  }
  Tensor forward(const Tensor& x) { return layers->forward(x); }
};

plan::ModuleTree planned(const std::shared_ptr<FlatImpl>& model) {
  const TorchModuleTree tree(model, true);
  const Example example{CallKind<FlatImpl, Tensor>::number, value::Tuple{{torch::ones({128, 64})}}};
  return model::plan_rows(tree, trace(tree, example)).first;
}

constexpr int kMicrobatches = 4;

plan::Report plan_over(int partitions, const plan::ModuleTree& rows) {
  config::Config config;
  config.partitions = partitions;
  config.microbatches = kMicrobatches;
  config.memory_weight = 0;
  return plan::plan_for(config::with_defaults(config), rows);
}

// The layers that are planned, in the order of their calls.
std::vector<int> layers_of(const plan::ModuleTree& rows) {
  std::vector<int> found;
  for (int row = 0; row < static_cast<int>(rows.size()); ++row) {
    if (rows[row].parent == 0 && !rows[row].anywhere) found.push_back(row);
  }
  return found;
}

int crossings(const std::vector<int>& layers, const plan::Assignment& owners) {
  int count = 0;
  base::Partition before(0);
  for (const int layer : layers) count += owners[layer] == std::exchange(before, owners[layer]) ? 0 : 1;
  return count;
}

// In order, or in a V: from the first partition to the last, and back.
int most_crossings(int partitions) { return 2 * (partitions - 1); }

TEST(PlannedTree, OfAFlatChainIsCutOnceOrIntoAVWithAnActivationForEachLayerOrOneForAll) {
  for (const bool one_activation : {false, true}) {
    const auto rows = planned(std::make_shared<FlatImpl>(one_activation));
    EXPECT_EQ(std::ranges::count(rows, true, &plan::Node::anywhere), one_activation ? 1 : 0);
    const int found = crossings(layers_of(rows), plan_over(2, rows).owners);
    EXPECT_TRUE(found == 1 || found == most_crossings(2)) << found;
  }
}

// The step, in microseconds, as the planner compares plans: without messages.
double compared_step_us(const plan::ModuleTree& rows, const plan::Assignment& owners, int partitions) {
  const plan::Goal goal{.partitions = partitions, .microbatches = kMicrobatches, .memory_weight = 0};
  return plan::mean_step_us(plan::work_of(plan::find_route(plan::settled(rows)), owners, goal), goal);
}

double even_step_us(plan::ModuleTree rows, int partitions) {
  const auto layers = layers_of(rows);
  std::vector<std::int64_t> nanoseconds;
  for (const int row : layers)
    nanoseconds.push_back(std::llround(1e3 * (rows[row].forward_us + rows[row].backward_us)));
  const auto even = plan::split_evenly(nanoseconds, partitions);
  int part = 0;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    while (i == even.ends[part]) ++part;
    rows[layers[i]].placed_at = base::Partition(part);
  }
  return compared_step_us(rows, plan_over(partitions, rows).owners, partitions);
}

TEST(PlannedTree, OfAnyFlatChainIsCutInOrderOrIntoAVAndStepsAreNoLongerThanThoseOfEvenParts) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    std::mt19937 draw(seed);
    const auto rows = planned(std::make_shared<FlatImpl>(draw, static_cast<int>(draw() % 101)));
    const auto layers = layers_of(rows);
    const int partitions = 2 + static_cast<int>(draw() % 3);
    const auto report = plan_over(partitions, rows);
    EXPECT_LE(crossings(layers, report.owners), most_crossings(partitions)) << "seed " << seed;
    if (layers.size() < static_cast<std::size_t>(partitions)) continue;
    EXPECT_LE(compared_step_us(rows, report.owners, partitions), 1.03 * even_step_us(rows, partitions))
        << "seed " << seed;
  }
}

struct ScopedImpl : torch::nn::Module {
  Child<torch::nn::Linear> scoped, placed;
  ScopedImpl() {
    const Partition on(1);
    scoped = register_module("scoped", torch::nn::Linear(4, 4));
    placed = register_module("placed", torch::nn::Linear(4, 4));
    set_partition(*placed, 2);
  }
};

TEST(PlannedTree, PlacesByScopesOnlyWhereTheyCountAndBySetPartitionAlways) {
  const auto model = std::make_shared<ScopedImpl>();
  const auto placed = [&](bool scopes_count) {
    const TorchModuleTree tree(model, scopes_count);
    std::vector<std::optional<base::Partition>> partitions;
    for (const auto& row : model::plan_rows(tree, std::nullopt).first) partitions.push_back(row.placed_at);
    return partitions;
  };
  using Partitions = std::vector<std::optional<base::Partition>>;
  EXPECT_EQ(placed(true), (Partitions{std::nullopt, base::Partition(1), base::Partition(2)}));
  EXPECT_EQ(placed(false), (Partitions{std::nullopt, std::nullopt, base::Partition(2)}));
}

}  // namespace
}  // namespace lamina::frontend::test
