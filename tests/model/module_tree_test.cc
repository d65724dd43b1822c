// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/module_tree.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "lamina/base/error.h"
#include "lamina/model/plan.h"

namespace lamina::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::ThrowsMessage;

Module module(std::string path, std::uintptr_t id, std::vector<Module::Tensor> tensors = {}) {
  Module module{.path = std::move(path), .id = id, .type = "Type", .same_everywhere = true};
  module.tensors = std::move(tensors);
  return module;
}
Module part(Module module) {
  module.role = Role::kPart;
  return module;
}
Module container(Module module) {
  module.role = Role::kContainer;
  return module;
}
Module indivisible(Module module) {
  module.indivisible = true;
  return module;
}
Module placed(Module module, int partition) {
  module.placed_at = partition;
  return module;
}

ModuleTree filled(const std::vector<Module>& modules) {
  ModuleTree tree;
  for (const auto& each : modules) tree.add(each);
  return tree;
}

std::vector<std::string> names(const ModuleTree& tree) {
  std::vector<std::string> names;
  for (const auto& node : tree.nodes()) names.push_back(node.name);
  return names;
}

std::vector<int> homes(const ModuleTree& tree) {
  std::vector<int> homes;
  for (const auto& held : tree.tensors()) homes.push_back(held.node);
  return homes;
}

at::Tensor tensor() { return at::zeros({2, 3}); }

TEST(ModuleTree, HasEachModuleOnceUnderItsFirstPathParentsFirst) {
  const auto tree = filled({module("", 1), module("a", 2), module("a.b", 3), module("c", 2), module("c.b", 3)});
  EXPECT_THAT(names(tree), ElementsAre("", "a", "a.b"));
  EXPECT_THAT(tree.paths(), ElementsAre(Pair("", 0), Pair("a", 1), Pair("a.b", 2), Pair("c", 1), Pair("c.b", 2)));
  EXPECT_EQ(tree.nodes()[2].parent, 1);
  EXPECT_EQ(tree.nodes()[1].places, 2);
}

TEST(ModuleTree, DescribesSlicesByTheirWholes) {
  const auto holding = [](const at::Tensor& slice) {
    return filled({module("", 1, {{"weight", slice, false, true, {3, 3}}})}).description();
  };
  EXPECT_EQ(holding(at::zeros({2, 3})), holding(at::zeros({1, 3})));
  EXPECT_THAT(holding(at::zeros({2, 3})), testing::HasSubstr("(3, 3)"));
}

TEST(ModuleTree, GivesWhatAPartHoldsToTheNearestModuleAboveThatIsCalled) {
  const auto tree =
      filled({module("", 1), container(module("list", 2)), part(module("list.scales", 3, {{"0", tensor()}})),
              module("list.block", 4), part(module("list.block.scales", 5, {{"0", tensor()}}))});
  EXPECT_THAT(names(tree), ElementsAre("", "list", "list.block"));
  EXPECT_THAT(homes(tree), ElementsAre(0, 2));
  EXPECT_EQ(tree.node(3), -1);
}

TEST(ModuleTree, KeepsAnIndivisibleModuleWithAllUnderItInOneNode) {
  const auto tree = filled({module("", 1), indivisible(module("a", 2, {{"weight", tensor()}})),
                            container(module("a.list", 3)), module("a.list.0", 4, {{"weight", tensor()}}),
                            indivisible(part(module("scales", 5))), module("scales.0", 6, {{"weight", tensor()}})});
  EXPECT_THAT(names(tree), ElementsAre("", "a"));
  EXPECT_THAT(homes(tree), ElementsAre(1, 1, 0));
  EXPECT_EQ(tree.homes().at(4), 1);
}

TEST(ModuleTree, NumbersASharedParameterOnceAndKnowsAllThatHoldIt) {
  const auto shared = tensor();
  const auto tree = filled({module("", 1), module("a", 2, {{"weight", shared}, {"mean", tensor(), /*buffer=*/true}}),
                            module("b", 3, {{"bias", tensor()}, {"weight", shared}, {"none", {}}})});
  EXPECT_THAT(tree.nodes()[1].parameter_ids, ElementsAre(0));
  EXPECT_THAT(tree.nodes()[2].parameter_ids, ElementsAre(1, 0));
  EXPECT_THAT(tree.holders(shared), ElementsAre(1, 2));
  EXPECT_TRUE(tree.holders(tensor()).empty());
  std::vector<std::string> found;
  for (const auto& held : tree.tensors()) found.push_back(held.name);
  EXPECT_THAT(found, ElementsAre("a.weight", "b.bias", "a.mean"));
}

TEST(ModuleTree, RefusesALazyModuleByName) {
  EXPECT_THAT([] { filled({module("", 1), module("a", 2, {{"weight", tensor(), false, /*has_shape=*/false}})}); },
              ThrowsMessage<base::UsageError>(HasSubstr("a.weight has no shape yet")));
}

TEST(ModuleTree, StartsStreamsInWhatDrawsAndInAllAboveIt) {
  auto drawing = part(module("b.c", 4));
  drawing.draws = true;
  const auto tree = filled({module("", 1), module("a", 2), module("b", 3), drawing});
  EXPECT_THAT(tree.starts_rng_stream(), ElementsAre(true, false, true));
}

TEST(ModuleTree, WaitsForWhatIsDynamicAndForStatisticsOfSeveralParents) {
  auto norm = module("a.norm", 4), again = module("b.norm", 4), alone = module("c.norm", 6);
  for (auto* each : {&norm, &again, &alone}) each->keeps_statistics = true;
  auto dynamic = module("d", 7);
  dynamic.dynamic = true;
  const auto tree = filled(
      {module("", 1), module("a", 2), norm, module("b", 3), again, module("c", 5), alone, dynamic, module("e", 8)});
  EXPECT_THAT(names(tree), ElementsAre("", "a", "a.norm", "b", "c", "c.norm", "d", "e"));
  EXPECT_THAT(tree.waited_for(), ElementsAre(true, true, true, true, false, false, true, false));
}

TEST(ModuleTree, DescribesEqualModelsAlikeAndOthersNot) {
  const auto one = filled({module("", 1, {{"weight", tensor()}})}).description();
  EXPECT_EQ(one, filled({module("", 9, {{"weight", tensor()}})}).description());
  EXPECT_NE(one, filled({module("", 1, {{"weight", at::zeros({2, 4})}})}).description());
  EXPECT_NE(one, filled({module("", 1, {{"weight", tensor()}}), module("a", 2)}).description());
}

TEST(PlanRows, RunAnywhereWhereAModuleOfTorchsHoldsNothingAndSeveralWantIt) {
  auto others = module("other", 7);
  others.same_everywhere = false;
  const auto tree =
      filled({module("", 1), module("twice", 2), module("again", 2), module("once", 3), module("often", 4),
              module("holds", 5, {{"weight", tensor()}}), placed(module("placed", 6), 1), others, module("parent", 8),
              part(module("parent.part", 9))});
  std::vector<Cost> costs(tree.size());
  for (const int node : {3, 4, 5, 6, 7}) costs[node].calls = 2;
  costs[2].calls = 1;
  std::vector<std::string> anywhere;
  for (const auto& row : plan_rows(tree, costs).first) {
    if (row.anywhere) anywhere.push_back(row.name);
  }
  EXPECT_THAT(anywhere, ElementsAre("twice", "often"));
}

TEST(PlanRows, HaveANodesTimesSharedOutAmongItsStretches) {
  std::vector<Cost> costs(1);
  costs[0] = {.order = 0, .calls = 1, .forward_us = 8, .backward_us = 6};
  costs[0].stretches = {{.at = 0, .forward_us = 1}, {.at = 1, .forward_us = 3}};
  const auto [rows, nodes] = plan_rows(filled({module("", 1)}), costs);
  EXPECT_EQ(rows[0].stretches[0].forward_us, 2);
  EXPECT_EQ(rows[0].stretches[1].forward_us, 6);
  EXPECT_EQ(rows[0].stretches[0].backward_us, 3) << "nothing is known of it";
}

TEST(PlanRows, HaveWeightPartsInTheSameProportionToTheirBackwards) {
  std::vector<Cost> costs(1);
  costs[0] = {.order = 0, .calls = 1, .forward_us = 8, .backward_us = 12};
  costs[0].stretches.resize(3);
  for (int at = 0; at < 3; ++at) {
    costs[0].stretches[at].at = at;
    costs[0].stretches[at].backward_us = at;
    if (at > 0) costs[0].stretches[at].weights_us = 1;
  }
  const auto [rows, nodes] = plan_rows(filled({module("", 1)}), costs);
  EXPECT_EQ(rows[0].stretches[0].weights_us, std::nullopt);
  EXPECT_EQ(rows[0].stretches[1].weights_us, 4);
  EXPECT_EQ(rows[0].stretches[2].weights_us, 4);
}

TEST(Plan, CountsWhatARankHasOfShardedParameters) {
  const auto tree = filled({module("", 1), module("large", 2, {{"weight", at::zeros({7, 3})}}),
                            module("small", 3, {{"weight", at::zeros({4})}})});
  config::Config config;
  config.sharded_data_parallel_degree = 4;
  config.sdp_param_persistence_threshold = 5;
  const auto plan = plan_model(tree, {}, config::with_defaults(config), 4, 1);
  EXPECT_EQ(plan.report.stages[0].parameter_bytes, 4 * (6 + 4));
  EXPECT_EQ(plan.report.stages[0].memory_bytes, 2 * 4 * (6 + 4));
}

}  // namespace
}  // namespace lamina::model
