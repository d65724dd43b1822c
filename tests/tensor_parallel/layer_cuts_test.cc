// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/layer_cuts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::tensor_parallel {
namespace {

using layout::Section;
using layout::Slicing;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

PlannedLayer linear(const std::string& name, const std::string& style, std::int64_t out, std::int64_t in,
                    std::size_t parent = 0) {
  PlannedLayer layer;
  layer.name = name;
  layer.type = "Linear";
  layer.kind = LayerKind::kLinear;
  layer.shape = {out, in};
  layer.has_bias = true;
  layer.style = style;
  layer.parent = parent;
  return layer;
}

PlannedLayer embedding(const std::string& style, std::int64_t words, std::int64_t features) {
  auto layer = linear("words", style, words, features);
  layer.type = "Embedding";
  layer.kind = LayerKind::kEmbedding;
  return layer;
}

// Layers of a module with these numbers.
PlannedLayers in_module(std::map<std::string, std::int64_t> numbers, std::vector<PlannedLayer> layers) {
  return {{{0, {"block", "Block", false, std::move(numbers)}}}, std::move(layers), {}, {}};
}

std::string refused(const PlannedLayers& planned, int degree = 2) {
  try {
    cut_layers(planned, degree, 0);
  } catch (const base::UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(LayerCuts, ColumnsAndRowsAreSharedOutAlike) {
  const auto cuts = cut_layers(in_module({}, {linear("up", "colwise", 7, 3), linear("down", "rowwise", 3, 7)}), 2, 1);
  const Section section{7, 1};
  EXPECT_THAT(cuts.layers[0].slices,
              ElementsAre(Pair("weight", Slicing{0, {section}, 2}), Pair("bias", Slicing{0, {section}, 2})));
  EXPECT_THAT(cuts.layers[1].slices, ElementsAre(Pair("weight", Slicing{1, {section}, 2})));
  for (const auto& cut : cuts.layers) {
    EXPECT_THAT(cut.sizes, ElementsAre(4, 3));
    EXPECT_EQ(cut.part, (SlicePart{3, 4, 7}));
  }
  EXPECT_THAT(cuts.layers[0].numbers, ElementsAre(Pair("out_features", 3), Pair("nf", 3)));
  EXPECT_THAT(cuts.layers[1].numbers, ElementsAre(Pair("in_features", 3), Pair("nx", 3)));
  ASSERT_EQ(cuts.parents.size(), 1U);
  EXPECT_EQ(cuts.parents[0].members[0].gives, (SlicePart{3, 4, 7}));
  EXPECT_FALSE(cuts.parents[0].members[1].gives);
  EXPECT_FALSE(cuts.parents[0].heads);
}

TEST(LayerCuts, TransformersConv1dIsTurnedRound) {
  auto layer = linear("up", "colwise", 3, 8);
  layer.kind = LayerKind::kConv1d;
  EXPECT_THAT(cut_layers(in_module({}, {layer}), 2, 0).layers[0].slices,
              ElementsAre(Pair("weight", Slicing{1, {{8, 1}}, 2}), Pair("bias", Slicing{0, {{8, 1}}, 2})));
}

TEST(LayerCuts, NoHeadIsTorn) {
  const auto planned =
      in_module({{"num_heads", 3}}, {linear("q", "colwise", 12, 12), linear("out", "rowwise", 12, 12)});
  const auto cuts = cut_layers(planned, 2, 0);
  EXPECT_THAT(cuts.layers[0].sizes, ElementsAre(8, 4));
  EXPECT_THAT(cuts.layers[1].sizes, ElementsAre(8, 4));
  EXPECT_EQ(cuts.parents[0].heads, (SlicePart{2, 0, 3}));
  EXPECT_THAT(cuts.parents[0].numbers, ElementsAre(Pair("num_heads", 2)));
}

TEST(LayerCuts, MatricesSideBySideAreCutApart) {
  const auto by_size = in_module({{"split_size", 8}}, {linear("qkv", "colwise", 24, 8)});
  EXPECT_THAT(cut_layers(by_size, 2, 0).layers[0].slices[0].second.sections,
              ElementsAre(Section{8, 1}, Section{8, 1}, Section{8, 1}));
  const auto by_heads = in_module({{"num_heads", 4}}, {linear("qkv", "packed_colwise", 24, 8)});
  EXPECT_THAT(cut_layers(by_heads, 2, 0).layers[0].slices[0].second.sections,
              ElementsAre(Section{8, 2}, Section{8, 2}, Section{8, 2}));
  EXPECT_THAT(refused(in_module({}, {linear("gate", "packed_colwise", 7, 8)})),
              HasSubstr("gate has 7 features, which are no 2 matrices side by side"));
}

TEST(LayerCuts, MembersComputeTheSameHeadsOfKeysWhereTheseAreFewer) {
  const std::map<std::string, std::int64_t> numbers{{"num_heads", 4}, {"num_kv_heads", 2}, {"head_dim", 2}};
  const auto planned = in_module(numbers, {linear("q", "colwise", 8, 8), linear("k", "colwise", 4, 8)});
  const auto keys = cut_layers(planned, 4, 3).layers[1];
  EXPECT_EQ(keys.style, kChosen);
  EXPECT_TRUE(keys.slices.empty());
  EXPECT_THAT(*keys.chosen, ElementsAre(2, 3));
}

TEST(LayerCuts, AWrapperIsWholeAndGivesAPart) {
  auto giving = linear("up", "packed_colwise", 8, 3), taking = linear("down", "rowwise", 3, 8);
  giving.is_around = taking.is_around = true;
  const auto cuts = cut_layers(in_module({}, {giving, taking}), 2, 1);
  EXPECT_EQ(cuts.layers[0].style, kGivingPart);
  EXPECT_THAT(*cuts.layers[0].chosen, ElementsAre(2, 3, 6, 7));
  EXPECT_EQ(cuts.layers[1].style, kTakingParts);
  EXPECT_THAT(cuts.layers[1].sections, ElementsAre(Section{8, 1}));
  EXPECT_TRUE(cuts.layers[0].slices.empty() && cuts.layers[1].slices.empty());
}

TEST(LayerCuts, AnEmbeddingHasSomeWordsOrSomeFeatures) {
  auto words = embedding("embedding_rowwise", 10, 4);
  words.padding = 7;
  const auto cut = cut_layers(in_module({}, {words}), 2, 1).layers[0];
  EXPECT_THAT(cut.slices, ElementsAre(Pair("weight", Slicing{0, {{10, 1}}, 2})));
  EXPECT_EQ(cut.padding, 2);
  EXPECT_FALSE(cut_layers(in_module({}, {words}), 2, 0).layers[0].padding);
  EXPECT_THAT(cut_layers(in_module({}, {embedding("colwise", 10, 4)}), 2, 1).layers[0].numbers,
              ElementsAre(Pair("embedding_dim", 2)));
  words.has_options = true;
  EXPECT_THAT(refused(in_module({}, {words})), HasSubstr("nor max_norm, scale_grad_by_freq and sparse"));
}

TEST(LayerCuts, AForwardOfItsOwnThatTakesWholesHasSizesOfTheWhole) {
  auto layer = linear("up", "colwise_gather_output", 8, 3);
  layer.has_own_forward = true;
  EXPECT_TRUE(cut_layers(in_module({}, {layer}), 2, 0).layers[0].numbers.empty());
}

TEST(LayerCuts, AResultBesideTheHeadsIsCutAsTheyAre) {
  const PlannedLayers planned{
      {{0, {"h.0.self", "Self", false, {{"num_heads", 3}, {"head_dim", 4}}}},
       {1, {"h.0.output", "Output", false, {}}},
       {2, {"h.1.output", "Output", false, {}}}},
      {linear("h.0.self.q", "colwise", 12, 12), linear("h.0.output.dense", "rowwise", 12, 12, 1),
       linear("h.1.output.dense", "rowwise", 12, 12, 2)},
      {},
      {}};
  const auto cuts = cut_layers(planned, 2, 0);
  EXPECT_THAT(cuts.layers[1].sizes, ElementsAre(8, 4));
  EXPECT_THAT(cuts.layers[2].sizes, ElementsAre(6, 6));
}

TEST(LayerCuts, ALayerInTwoModulesIsRefusedWhereTheirHeadsDiffer) {
  PlannedLayers planned{{{0, {"a", "A", false, {{"num_heads", 4}}}}, {1, {"b", "B", false, {{"num_heads", 2}}}}},
                        {linear("a.q", "colwise", 8, 8)},
                        {linear("a.q", "colwise", 8, 8, 1)},
                        {}};
  EXPECT_THAT(refused(planned), HasSubstr("a.q is in b, too, which has other heads"));
  planned.parents[1].numbers["num_heads"] = 4;
  const auto cuts = cut_layers(planned, 2, 1);
  ASSERT_EQ(cuts.parents.size(), 2U);
  EXPECT_EQ(cuts.parents[1].members[0].row, 1U);
  EXPECT_EQ(cuts.parents[1].members[0].gives, (SlicePart{4, 4, 8}));
}

TEST(LayerCuts, ATiedParameterIsCutAlikeOrNotAtAll) {
  auto planned = in_module({}, {linear("head", "colwise_gather_output", 10, 4)});
  planned.tied = {{"words.weight", "head.weight"}};
  EXPECT_TRUE(cut_layers(planned, 2, 0).layers.empty());
  planned.layers[0].may_stay_whole = false;
  EXPECT_THAT(refused(planned), HasSubstr("head cannot be sliced: words.weight and head.weight are one parameter"));
  planned.layers.insert(planned.layers.begin(), embedding("embedding_rowwise", 10, 4));
  EXPECT_EQ(cut_layers(planned, 2, 0).layers.size(), 2U);
}

TEST(LayerCuts, RefusalsSayWhatToDo) {
  EXPECT_THAT(
      refused(in_module({}, {linear("up", "colwise", 2, 8)}), 4),
      HasSubstr("up has 2 features in units of 1, and with tensor_parallel_degree: 4 some rank would have none"));
  EXPECT_THAT(refused(in_module({{"num_heads", 3}}, {linear("q", "colwise", 8, 8)})),
              HasSubstr("q has 8 features, which are no whole number of them for each of 3 heads of Block"));
  EXPECT_THAT(refused(in_module({}, {linear("up", "embedding_rowwise", 8, 8)})),
              HasSubstr("up is a Linear, and a plan slices torch's Linear and Embedding"));
  auto named = linear("up", "colwise", 8, 8);
  named.heads = SaidHeads{"nhead", 0};
  EXPECT_THAT(refused(in_module({}, {named})), HasSubstr("set_tensor_parallelism(heads=\"nhead\"): no module around"));
  auto fused = linear("qkv", "colwise", 24, 8);
  fused.may_stay_whole = false;
  EXPECT_THAT(refused(in_module({{"num_heads", 4}, {"head_dim", 2}, {"num_kv_heads", 4}}, {fused})),
              HasSubstr("qkv gives queries, keys and values in one: say \"packed_colwise\""));
}

}  // namespace
}  // namespace lamina::tensor_parallel
