// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/known_styles.h"

#include <algorithm>

namespace lamina::tensor_parallel {
namespace {

struct LayerStyle {
  std::string_view layer, style;
};

// Layers of a class of transformers.
struct KnownClass {
  std::string_view name;  // below "transformers.models."
  std::span<const LayerStyle> layers;
};

constexpr LayerStyle kAttention[] = {{"query", "colwise"},   {"key", "colwise"},    {"value", "colwise"},
                                     {"q_proj", "colwise"},  {"k_proj", "colwise"}, {"v_proj", "colwise"},
                                     {"out_proj", "rowwise"}};
constexpr LayerStyle kOutput[] = {{"dense", "rowwise"}};
constexpr LayerStyle kIntermediate[] = {{"dense", "colwise"}};
constexpr LayerStyle kGpt2Attention[] = {{"c_attn", "colwise"}, {"q_attn", "colwise"}, {"c_proj", "rowwise"}};
constexpr LayerStyle kGpt2Mlp[] = {{"c_fc", "colwise"}, {"c_proj", "rowwise"}};
constexpr LayerStyle kGptjMlp[] = {{"fc_in", "colwise"}, {"fc_out", "rowwise"}};
constexpr LayerStyle kOptLayer[] = {{"fc1", "colwise"}, {"fc2", "rowwise"}};
constexpr LayerStyle kPhi3Mlp[] = {{"gate_up_proj", "packed_colwise"}, {"down_proj", "rowwise"}};
constexpr LayerStyle kT5Attention[] = {
    {"q", "colwise"}, {"k", "colwise"}, {"v", "colwise"}, {"relative_attention_bias", "colwise"}, {"o", "rowwise"}};
constexpr LayerStyle kT5Dense[] = {{"wi", "colwise"}, {"wo", "rowwise"}};
constexpr LayerStyle kT5Gated[] = {{"wi_0", "colwise"}, {"wi_1", "colwise"}, {"wo", "rowwise"}};

constexpr KnownClass kKnownClasses[] = {
    {"bert.modeling_bert.BertSelfAttention", kAttention},
    {"bert.modeling_bert.BertCrossAttention", kAttention},
    {"bert.modeling_bert.BertSelfOutput", kOutput},
    {"bert.modeling_bert.BertIntermediate", kIntermediate},
    {"bert.modeling_bert.BertOutput", kOutput},
    {"roberta.modeling_roberta.RobertaSelfAttention", kAttention},
    {"roberta.modeling_roberta.RobertaCrossAttention", kAttention},
    {"roberta.modeling_roberta.RobertaSelfOutput", kOutput},
    {"roberta.modeling_roberta.RobertaIntermediate", kIntermediate},
    {"roberta.modeling_roberta.RobertaOutput", kOutput},
    {"gpt2.modeling_gpt2.GPT2Attention", kGpt2Attention},
    {"gpt2.modeling_gpt2.GPT2MLP", kGpt2Mlp},
    {"gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention", kAttention},
    {"gpt_neo.modeling_gpt_neo.GPTNeoMLP", kGpt2Mlp},
    {"gptj.modeling_gptj.GPTJAttention", kAttention},
    {"gptj.modeling_gptj.GPTJMLP", kGptjMlp},
    {"opt.modeling_opt.OPTAttention", kAttention},
    {"opt.modeling_opt.OPTDecoderLayer", kOptLayer},
    {"phi3.modeling_phi3.Phi3MLP", kPhi3Mlp},
    {"t5.modeling_t5.T5Attention", kT5Attention},
    {"t5.modeling_t5.T5DenseActDense", kT5Dense},
    {"t5.modeling_t5.T5DenseGatedActDense", kT5Gated},
};

constexpr std::string_view kModels = "transformers.models.";
constexpr LayerStyle kAliases[] = {{"colwise_rep", "colwise_gather_output"}, {"rowwise_rep", "rowwise_split_input"}};
constexpr LayerStyle kByParent[] = {{"colwise_of_ready", "colwise"}, {"rowwise_to_positions", "rowwise"}};
constexpr std::string_view kExperts[] = {"moe_tp_experts", "moe_identity_expert"};
constexpr std::string_view kLatentKeys = "mla_kv_a_proj";  // some of what it gives is for all heads, and some for each

constexpr std::string_view kLinear = "torch.nn.modules.linear.Linear";
constexpr std::string_view kEmbedding = "torch.nn.modules.sparse.Embedding";
constexpr std::string_view kConv1d[] = {"transformers.pytorch_utils.Conv1D", "transformers.modeling_utils.Conv1D"};
constexpr std::string_view kSequential = "torch.nn.modules.container.Sequential";
constexpr std::string_view kLists[] = {"torch.nn.modules.container.ModuleList",
                                       "torch.nn.modules.container.ModuleDict"};
constexpr std::string_view kCalling[] = {"peft.tuners.adalora.layer.SVDLinear", "peft.tuners.ia3.layer.Linear",
                                         "peft.tuners.ia3.layer.Embedding",     "peft.tuners.lora.layer.Embedding",
                                         "peft.tuners.oft.layer.Linear",        "peft.tuners.vera.layer.Linear"};

bool is_one_of(std::span<const std::string> classes, std::span<const std::string_view> names) {
  return std::ranges::any_of(classes, [&](const auto& each) { return std::ranges::find(names, each) != names.end(); });
}

bool is_a(std::span<const std::string> classes, std::string_view name) { return is_one_of(classes, {&name, 1}); }

// The style of that row; "" without one.
std::string_view style_of(std::span<const LayerStyle> rows, std::string_view name) {
  const auto found = std::ranges::find(rows, name, &LayerStyle::layer);
  return found == rows.end() ? "" : found->style;
}

}  // namespace

std::string style_of_alias(const std::string& style) {
  const auto found = style_of(kAliases, style);
  return found.empty() ? style : std::string(found);
}

std::string_view style_by_parent(const std::string& style) { return style_of(kByParent, style); }

bool is_of_experts(const std::string& style) { return std::ranges::find(kExperts, style) != std::end(kExperts); }

bool is_of_latent_keys(const std::string& style) { return style == kLatentKeys; }

Styles known_styles(std::span<const std::string> classes) {
  Styles styles;
  for (const auto& name : classes) {
    if (!name.starts_with(kModels)) continue;
    const auto below = std::string_view(name).substr(kModels.size());
    const auto found = std::ranges::find(kKnownClasses, below, &KnownClass::name);
    if (found == std::end(kKnownClasses)) continue;
    for (const auto& [layer, style] : found->layers) styles.emplace_back(layer, style);
    break;
  }
  return styles;
}

bool is_plain_linear(std::span<const std::string> classes) { return !classes.empty() && classes.front() == kLinear; }

LayerKind kind_of(std::span<const std::string> classes) {
  if (is_a(classes, kEmbedding)) return LayerKind::kEmbedding;
  if (is_a(classes, kLinear)) return LayerKind::kLinear;
  return is_one_of(classes, kConv1d) ? LayerKind::kConv1d : LayerKind::kOther;
}

bool is_of_transformers(std::span<const std::string> classes) {
  return !classes.empty() && classes.front().starts_with("transformers.");
}

bool has_transformers_plan(std::span<const std::string> classes) {
  return std::ranges::any_of(classes, [](const auto& name) {
    return name.starts_with("transformers.") && name.ends_with(".PreTrainedModel");
  });
}

bool only_calls(std::span<const std::string> classes) { return is_one_of(classes, kCalling); }

bool is_list(std::span<const std::string> classes) { return is_one_of(classes, kLists); }

bool reads_weights(std::span<const std::string> classes) {
  return !classes.empty() && classes.front().starts_with("torch.nn.") && !is_list(classes) &&
         !is_a(classes, kSequential);
}

}  // namespace lamina::tensor_parallel
