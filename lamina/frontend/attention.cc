// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/attention.h"

#include <torch/nn/init.h>

#include "lamina/layers/operators.h"
#include "lamina/tensor_parallel/operators.h"
#include "lamina/tensor_parallel/slices.h"

namespace lamina::nn {
namespace {

constexpr int kHeads = 1, kPositions = 2;  // of queries and keys [N, h, S, D]

// Gives Linears normal values, and biases of zero.
void begin_normal(const torch::nn::Module& module, double deviation) {
  for (const auto& part : module.children()) {
    auto* linear = dynamic_cast<torch::nn::LinearImpl*>(part.get());
    if (linear == nullptr) continue;
    torch::nn::init::normal_(linear->weight, 0, deviation);
    if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
  }
}

// The input of layers that are cut by columns, with all positions. Its gradients are added over the ranks.
at::Tensor ready(const std::optional<frontend::Member>& member, const at::Tensor& given, std::int64_t positions) {
  if (!member) return given;
  if (positions == 0) return tensor_parallel::copy(given, member->team);
  return tensor_parallel::all_gather(given, member->cut(positions), member->team);
}

// The whole of the ranks' terms, or this rank's part of its positions.
at::Tensor summed(SlicedLinear& dense, const at::Tensor& part, std::int64_t positions) {
  return positions == 0 ? dense(part) : dense->to_positions(part, positions);
}

// A part's result, from what it has computed of its input.
template <class Part>
at::Tensor finished(Part& part, const TransformerOptions& options, const at::Tensor& input, const at::Tensor& computed,
                    std::int64_t positions) {
  auto output = part.dropout(computed, positions);
  if (options.add_input) output = layers::residual_sum(input, output, options.fp32_residual_addition);
  return part.layernorm.is_empty() ? output : part.layernorm(output, positions > 0);
}

}  // namespace

DistributedAttentionLayerImpl::DistributedAttentionLayerImpl(const TransformerOptions& options) : options_(options) {
  layers::check("DistributedAttentionLayer", options);
  const auto hidden = options.hidden_size, size = options.attention_head_size;
  const auto inside = options.num_attention_heads * size;
  const auto in = [&] { return SlicedLinear(hidden, inside, Style::kColwiseOfReady, options.qkv_bias, size); };
  query = register_module("query", in());
  key = register_module("key", in());
  value = register_module("value", in());
  dense = register_module("dense", SlicedLinear(inside, hidden, Style::kRowwise, options.dense_bias, size));
  dropout = register_module("dropout", DistributedDropout(options.hidden_dropout_prob));
  const auto norm = [&] { return DistributedLayerNorm(hidden, options.layernorm_epsilon); };
  if (options.pre_layernorm) pre_layernorm = register_module("pre_layernorm", norm());
  if (options.post_layernorm) layernorm = register_module("layernorm", norm());
  if (options.use_normal_initialization) begin_normal(*this, options.initializer_range);
  heads_ = {0, options.num_attention_heads, options.num_attention_heads};
}

void DistributedAttentionLayerImpl::begin(const frontend::Member& member) {
  Sliced::begin(member);
  heads_ = tensor_parallel::shares_of(options_.num_attention_heads, 1, member.degree)[member.index];
}

at::Tensor DistributedAttentionLayerImpl::in_heads(SlicedLinear& layer, const at::Tensor& given) const {
  return layer(given).unflatten(-1, {heads_.count(), options_.attention_head_size}).transpose(kHeads, kPositions);
}

at::Tensor DistributedAttentionLayerImpl::forward(const at::Tensor& states, const at::Tensor& mask,
                                                  const at::Tensor& others, std::int64_t positions) {
  const bool is_part = positions > 0;
  const auto normed = ready(member(), pre_layernorm.is_empty() ? states : pre_layernorm(states, is_part), positions);
  const auto seen = options_.cross_attention ? ready(member(), others, 0) : normed;
  const auto given = mask.defined() ? std::optional(mask) : std::nullopt;
  // One after the other: in this order their gradients are added.
  const auto queries = in_heads(query, normed), keys = in_heads(key, seen), values = in_heads(value, seen);
  const auto found = layers::attention(queries, keys, values, given, arguments());
  const auto output = summed(dense, found.transpose(kHeads, kPositions).flatten(2), positions);
  return finished(*this, options_, states, output, positions);
}

layers::AttentionArguments DistributedAttentionLayerImpl::arguments() const {
  layers::AttentionArguments arguments{.dropout_p = is_training() ? options_.attention_dropout_prob : 0,
                                       .cross_attention = options_.cross_attention,
                                       .causal_mask_size = options_.causal_mask_size,
                                       .window_size = options_.window_size,
                                       .use_alibi = options_.use_alibi,
                                       .alibi_bias_max = options_.alibi_bias_max,
                                       .rotary_dim = options_.rotary_dim,
                                       .scale = options_.scale,
                                       .attention_in_fp32 = options_.attention_in_fp32,
                                       .first_head = heads_.begin};
  if (member()) arguments.all_heads = options_.num_attention_heads;
  return arguments;
}

DistributedTransformerOutputLayerImpl::DistributedTransformerOutputLayerImpl(const TransformerOptions& options)
    : options_(options) {
  layers::check("DistributedTransformerOutputLayer", options);
  const auto hidden = options.hidden_size, inside = options.intermediate_size;
  dense1 = register_module("dense1", SlicedLinear(hidden, inside, Style::kColwiseOfReady));
  dense2 = register_module("dense2", SlicedLinear(inside, hidden, Style::kRowwise));
  dropout = register_module("dropout", DistributedDropout(options.hidden_dropout_prob));
  const auto norm = [&] { return DistributedLayerNorm(hidden, options.layernorm_epsilon); };
  if (options.pre_layernorm) pre_layernorm = register_module("pre_layernorm", norm());
  if (options.post_layernorm) layernorm = register_module("layernorm", norm());
  if (options.use_normal_initialization) begin_normal(*this, options.initializer_range);
}

at::Tensor DistributedTransformerOutputLayerImpl::forward(const at::Tensor& states, std::int64_t positions) {
  const auto normed = pre_layernorm.is_empty() ? states : pre_layernorm(states, positions > 0);
  const auto inside = layers::activation(dense1(ready(member(), normed, positions)), options_.activation);
  return finished(*this, options_, states, summed(dense2, inside, positions), positions);
}

}  // namespace lamina::nn
