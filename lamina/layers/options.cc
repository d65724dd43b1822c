// SPDX-License-Identifier: Apache-2.0
#include "lamina/layers/options.h"

#include <algorithm>
#include <iterator>
#include <sstream>

#include "lamina/base/error.h"
#include "lamina/faces/sayings.h"
#include "lamina/layers/operators.h"

namespace lamina::layers {
namespace {

using All = TransformerOptions;

constexpr Option kOptions[] = {
    {"num_layers", &All::num_layers},
    {"num_attention_heads", &All::num_attention_heads},
    {"attention_head_size", &All::attention_head_size},
    {"hidden_size", &All::hidden_size},
    {"intermediate_size", &All::intermediate_size},
    {"vocab_size", &All::vocab_size},
    {"num_positions", &All::num_positions},
    {"num_token_types", &All::num_token_types},
    {"attention_dropout_prob", &All::attention_dropout_prob},
    {"hidden_dropout_prob", &All::hidden_dropout_prob},
    {"embedding_dropout_prob", &All::embedding_dropout_prob},
    {"activation", &All::activation},
    {"layernorm_epsilon", &All::layernorm_epsilon},
    {"initializer_range", &All::initializer_range},
    {"use_normal_initialization", &All::use_normal_initialization},
    {"cross_attention", &All::cross_attention},
    {"add_cross_attention", &All::add_cross_attention},
    {"causal_mask_size", &All::causal_mask_size},
    {"window_size", &All::window_size},
    {"use_alibi", &All::use_alibi},
    {"alibi_bias_max", &All::alibi_bias_max},
    {"rotary_dim", &All::rotary_dim},
    {"scale", &All::scale},
    {"attention_in_fp32", &All::attention_in_fp32},
    {"fp32_residual_addition", &All::fp32_residual_addition},
    {"pre_layernorm", &All::pre_layernorm},
    {"post_layernorm", &All::post_layernorm},
    {"parallel_attn_output", &All::parallel_attn_output},
    {"add_input", &All::add_input},
    {"qkv_bias", &All::qkv_bias},
    {"dense_bias", &All::dense_bias},
    {"add_lm_head", &All::add_lm_head},
    {"tie_lm_head", &All::tie_lm_head},
    {"lm_head_bias", &All::lm_head_bias},
    {"loss_in_fp32", &All::loss_in_fp32},
};

// The options that a layer reads: its own, in the order of its arguments, and those of a layer to which it hands on
// what it does not name. It takes the latter by name alone, and none that it gives itself.
struct OptionsOfLayer {
  std::string_view layer, own, hands_on_to, gives;
  bool keeps_places = false;  // the other one's have places behind its own
};

constexpr OptionsOfLayer kLayers[] = {
    {"DistributedAttentionLayer",
     "num_attention_heads attention_head_size hidden_size attention_dropout_prob hidden_dropout_prob layernorm_epsilon "
     "initializer_range use_normal_initialization cross_attention causal_mask_size pre_layernorm post_layernorm "
     "use_alibi alibi_bias_max attention_in_fp32 fp32_residual_addition window_size scale qkv_bias dense_bias "
     "rotary_dim add_input"},
    {"DistributedTransformerOutputLayer",
     "hidden_size intermediate_size hidden_dropout_prob activation layernorm_epsilon initializer_range "
     "use_normal_initialization pre_layernorm post_layernorm fp32_residual_addition add_input"},
    {"DistributedTransformerLayer",
     "num_attention_heads attention_head_size hidden_size intermediate_size attention_dropout_prob hidden_dropout_prob "
     "activation layernorm_epsilon initializer_range use_normal_initialization causal_mask_size add_cross_attention "
     "pre_layernorm post_layernorm use_alibi alibi_bias_max fp32_residual_addition parallel_attn_output",
     "DistributedAttentionLayer", "cross_attention add_input"},
    {"DistributedTransformer", "num_layers", "DistributedTransformerLayer", "", true},
    {"DistributedTransformerLMHead",
     "num_layers num_attention_heads attention_head_size hidden_size intermediate_size vocab_size num_positions "
     "attention_dropout_prob hidden_dropout_prob activation layernorm_epsilon num_token_types causal_mask_size "
     "add_cross_attention add_lm_head initializer_range use_normal_initialization pre_layernorm post_layernorm "
     "embedding_dropout_prob tie_lm_head lm_head_bias loss_in_fp32",
     "DistributedTransformerLayer"},
};

std::vector<std::string> words_of(std::string_view text) {
  std::istringstream in{std::string(text)};
  return {std::istream_iterator<std::string>(in), {}};
}

bool has(const std::vector<LayerArgument>& arguments, std::string_view name) {
  return std::ranges::any_of(arguments, [&](const auto& each) { return each.option.name == name; });
}

// Refusals, each of options that a layer reads.

void require_sizes(const std::vector<LayerArgument>& read, const All& options) {
  for (const auto size : {&All::num_attention_heads, &All::attention_head_size, &All::hidden_size,
                          &All::intermediate_size, &All::vocab_size}) {
    for (const auto& [option, takes_place] : read) {
      const auto* field = std::get_if<Option::Of<std::int64_t>>(&option.field);
      if (field == nullptr || *field != size || options.*size > 0) continue;
      throw faces::refusal("not-a-size", option.name, options.*size);
    }
  }
}

void require_probability(std::string_view name, double value) {
  if (!(value >= 0 && value <= 1)) throw faces::refusal("not-a-probability", name, value);
}

void require_norms(const All& options) {
  if (!options.pre_layernorm && !options.post_layernorm) throw faces::refusal("no-layernorm");
  if (options.parallel_attn_output && (options.post_layernorm || options.add_cross_attention)) {
    throw faces::refusal("parallel-parts");
  }
}

}  // namespace

std::span<const Option> every_option() { return kOptions; }

std::vector<LayerArgument> arguments_of(std::string_view layer) {
  const auto* reader = std::ranges::find(kLayers, layer, &OptionsOfLayer::layer);
  base::internal_check(reader != std::end(kLayers), "a layer without options");
  std::vector<LayerArgument> arguments;
  for (const auto& name : words_of(reader->own)) {
    const auto* option = std::ranges::find(kOptions, name, &Option::name);
    base::internal_check(option != std::end(kOptions), "an option without a row");
    arguments.push_back({*option});
  }
  if (reader->hands_on_to.empty()) return arguments;
  const auto given = words_of(reader->gives);
  for (const auto& each : arguments_of(reader->hands_on_to)) {
    if (has(arguments, each.option.name) || std::ranges::count(given, each.option.name) > 0) continue;
    arguments.push_back({each.option, reader->keeps_places && each.takes_place});
  }
  return arguments;
}

TransformerOptions options_of_part(const TransformerOptions& layer) {
  auto part = layer;
  part.pre_layernorm = layer.pre_layernorm && !layer.parallel_attn_output;
  part.add_input = !layer.parallel_attn_output;
  part.cross_attention = false;
  return part;
}

void check(std::string_view layer, const TransformerOptions& options) {
  const auto read = arguments_of(layer);
  require_sizes(read, options);
  if (has(read, "attention_dropout_prob"))
    require_probability("attention_dropout_prob", options.attention_dropout_prob);
  require_probability("hidden_dropout_prob", options.hidden_dropout_prob);
  if (has(read, "activation")) require_activation(options.activation);
  if (has(read, "parallel_attn_output")) require_norms(options);
}

}  // namespace lamina::layers
