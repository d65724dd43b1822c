// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/plans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::tensor_parallel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

constexpr const char* kLinear = "torch.nn.modules.linear.Linear";
constexpr const char* kModule = "torch.nn.modules.module.Module";

// A model that is made module by module, each below the ones before.
class Model {
 public:
  ModelModule& add(const std::string& name, std::vector<std::string> classes = {"script.Block", kModule}) {
    modules_.names.emplace_back(name, modules_.modules.size());
    auto& module = modules_.modules.emplace_back();
    module.type = classes.front().substr(classes.front().rfind('.') + 1);
    module.classes = std::move(classes);
    module.is_marked = true;
    return module;
  }
  void linear(const std::string& name) {
    auto& layer = add(name, {kLinear, kModule});
    layer.in_features = 8;
    layer.parameters = {{"weight", modules_.modules.size()}};
  }
  void again(const std::string& name, std::size_t module) { modules_.names.emplace_back(name, module); }
  ModelModule& operator[](std::size_t number) { return modules_.modules[number]; }

  PlannedLayers plan(int degree = 2, bool in_parts = false) const { return plan_layers(modules_, degree, in_parts); }
  std::vector<std::pair<std::string, std::string>> styles() const {
    std::vector<std::pair<std::string, std::string>> styles;
    for (const auto& layer : plan().layers) styles.emplace_back(layer.name, layer.style);
    return styles;
  }
  std::vector<std::string> whole(const std::set<std::string>& sliced) const {
    return marked_but_whole(modules_, sliced);
  }
  std::string refused() const {
    try {
      plan();
    } catch (const base::UsageError& error) {
      return error.what();
    }
    return "";
  }

 private:
  ModelModules modules_;
};

Model blocks() {
  Model model;
  model.add("");
  model.add("blocks", {"torch.nn.modules.container.ModuleList", kModule});
  for (const std::string name : {"blocks.0", "blocks.1"}) {
    model.add(name);
    model.linear(name + ".up");
    model.linear(name + ".down");
  }
  return model;
}

TEST(Plans, AStarStandsForAPartOfAName) {
  auto model = blocks();
  model[0].plan = Styles{{"blocks.*.up", "colwise"}, {"blocks.1.d*", "rowwise"}};
  EXPECT_THAT(model.styles(), ElementsAre(Pair("blocks.0.up", "colwise"), Pair("blocks.1.up", "colwise"),
                                          Pair("blocks.1.down", "rowwise")));
  const auto planned = model.plan();
  EXPECT_EQ(planned.layers[0].parent, 2U);
  EXPECT_EQ(planned.parents.at(2).place, "blocks.0");
  EXPECT_FALSE(planned.layers[0].may_stay_whole);
}

TEST(Plans, APlanThatNamesNothingOffersTheNearestName) {
  auto model = blocks();
  model[0].plan = Styles{{"blocks.*.upp", "colwise"}};
  EXPECT_THAT(model.refused(), HasSubstr("the plan of Block has \"blocks.*.upp\", which matches no module, the nearest "
                                         "is \"blocks.*.up\""));
  model[0].plan = Styles{{"blocks.*.up", "colwis"}};
  EXPECT_THAT(model.refused(), HasSubstr("the style \"colwis\" for \"blocks.*.up\", the nearest is \"colwise\"; known "
                                         "are colwise, rowwise"));
}

TEST(Plans, TheInnermostPlanCounts) {
  auto model = blocks();
  model[0].plan = Styles{{"blocks.*.up", "colwise"}};
  model[2].plan = Styles{{"up", "replicate"}};
  EXPECT_THAT(model.styles(), ElementsAre(Pair("blocks.1.up", "colwise")));
}

TEST(Plans, LayersThatAreNotMarkedStayWhole) {
  auto model = blocks();
  model[0].plan = Styles{{"blocks.*.up", "colwise_rep"}};
  model[3].is_marked = false;
  EXPECT_THAT(model.styles(), ElementsAre(Pair("blocks.1.up", "colwise_gather_output")));
}

TEST(Plans, ClassesOfMarkedLayersThatStayWholeAreToldOnce) {
  auto model = blocks();
  model[6].is_marked = false;
  EXPECT_THAT(model.whole({"blocks.0.up"}), ElementsAre("Linear"));
  EXPECT_THAT(model.whole({"blocks.0.up", "blocks.0.down", "blocks.1.down"}), IsEmpty());
}

TEST(Plans, ClassesOfTransformersAreKnown) {
  Model model;
  model.add("", {"script.Own", "transformers.models.gpt2.modeling_gpt2.GPT2MLP", kModule});
  for (const auto* name : {"c_fc", "c_proj"}) model.add(name, {"transformers.pytorch_utils.Conv1D", kModule});
  EXPECT_THAT(model.styles(), ElementsAre(Pair("c_fc", "colwise"), Pair("c_proj", "rowwise")));
  EXPECT_EQ(model.plan().layers[0].kind, LayerKind::kConv1d);
  model[1].reaches_base = false;
  EXPECT_THAT(model.styles(), IsEmpty());
}

TEST(Plans, ThatOfTransformersMayNameWhatIsNotThere) {
  auto model = blocks();
  model[0].classes = {"script.Model", "transformers.modeling_utils.PreTrainedModel", kModule};
  model[0].transformers_plan = {{"blocks.*.up", "colwise"}, {"experts.*", "colwise"}, {"blocks.0", "moe_tp_experts"}};
  EXPECT_THAT(model.styles(), ElementsAre(Pair("blocks.1.up", "colwise")));
  model[0].transformers_plan = {{"blocks.*.up", "colwise"}, {"blocks.0.down", "mla_kv_a_proj"}};
  EXPECT_THAT(model.styles(), ElementsAre(Pair("blocks.1.up", "colwise")));
  model[0].transformers_plan = {{"blocks.0.up.weight", "colwise"}};
  EXPECT_THAT(model.refused(), HasSubstr("slices the parameter blocks.0.up.weight, which is not available"));
  model[0].plan = Styles{};
  EXPECT_THAT(model.styles(), IsEmpty());
}

TEST(Plans, ALinearThatWouldBecomeAnotherIsSlicedAlone) {
  auto model = blocks();
  model[3].is_replaced = model[4].is_replaced = true;
  model[4].in_features = 1;
  EXPECT_THAT(model.styles(), ElementsAre(Pair("blocks.0.up", "rowwise_split_input")));
  model[2].classes = {"torch.nn.modules.transformer.TransformerEncoderLayer", kModule};
  EXPECT_THAT(model.styles(), IsEmpty());
}

TEST(Plans, InAStackInPartsAnotherPlanCounts) {
  auto model = blocks();
  model[1].own_plan = OwnPlan{{}, {}, /*is_stack=*/true};
  model[2].own_plan = OwnPlan{{{"down", "rowwise"}}, {{"down", "rowwise_to_positions"}}, false};
  EXPECT_FALSE(model.plan(2, /*in_parts=*/false).layers.at(0).by_parent);
  const auto layer = model.plan(2, /*in_parts=*/true).layers.at(0);
  EXPECT_EQ(layer.style, "rowwise");
  EXPECT_TRUE(layer.by_parent);
}

Model low_rank(const std::string& style) {
  Model model;
  model.add("").plan = Styles{{"up", style}};
  model.add("up", {"peft.tuners.lora.layer.Linear", kModule});
  model[1].wrapped = {"base_layer", 2};
  for (const auto* name : {"up.base_layer", "up.lora_A", "up.lora_B"}) model.linear(name);
  return model;
}

TEST(Plans, OfALowRankWrapperOneSmallLayerIsCutWithItsLayer) {
  EXPECT_THAT(low_rank("colwise").styles(),
              ElementsAre(Pair("up.base_layer", "colwise"), Pair("up.lora_B", "colwise")));
  EXPECT_THAT(low_rank("rowwise").styles(),
              ElementsAre(Pair("up.base_layer", "rowwise"), Pair("up.lora_A", "rowwise")));
}

TEST(Plans, AnyOtherWrapperIsWholeAroundItsLayer) {
  auto model = low_rank("colwise");
  model[1].parameters = {{"magnitude", 99}};
  const auto planned = model.plan();
  ASSERT_EQ(planned.layers.size(), 1U);
  EXPECT_EQ(planned.layers[0].name, "up");
  EXPECT_TRUE(planned.layers[0].is_around);
  EXPECT_EQ(planned.layers[0].layer, 2U);
  EXPECT_EQ(planned.layers[0].member, 1U);
  model[1].classes.front() = "peft.tuners.vera.layer.Linear";  // which never reads its layer's weight
  EXPECT_THAT(model.styles(), ElementsAre(Pair("up.base_layer", "colwise_gather_output"), Pair("up", "colwise")));
}

TEST(Plans, AWrapperCannotTakePartInExchanges) {
  auto model = low_rank("colwise");
  model[0].plan.reset();
  model[0].own_plan = OwnPlan{{{"up", "colwise_of_ready"}}, {}, false};
  EXPECT_THAT(model.refused(), HasSubstr("up (Linear) has the place of a layer of lamina.nn"));
}

TEST(Plans, LayersInSeveralPlacesAndTiedParametersAreTold) {
  auto model = blocks();
  model[0].plan = Styles{{"blocks.0.up", "colwise"}};
  model.again("blocks.1.also", 3);
  model[7].parameters = model[3].parameters;
  const auto planned = model.plan();
  ASSERT_EQ(planned.elsewhere.size(), 1U);
  EXPECT_EQ(planned.elsewhere[0].parent, 5U);
  EXPECT_THAT(planned.tied, ElementsAre(ElementsAre("blocks.0.up.weight", "blocks.1.down.weight")));
}

}  // namespace
}  // namespace lamina::tensor_parallel
