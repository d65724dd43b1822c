// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/attention.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/init.h>

#include <cmath>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/faces/sayings.h"
#include "lamina/tensor_parallel/dropout.h"
#include "lamina/tensor_parallel/operators.h"
#include "lamina/tensor_parallel/slices.h"

namespace lamina::nn {
namespace {

constexpr int kHeads = 1, kPositions = 2;  // of queries and keys [N, h, S, D]
constexpr double kLowest = -std::numeric_limits<double>::infinity();

bool is_half(const at::Tensor& tensor) { return c10::elementSize(tensor.scalar_type()) < sizeof(float); }

// The sum of what a layer was given and what it has computed, in the type of these.
at::Tensor added(const at::Tensor& input, const at::Tensor& output, bool in_fp32) {
  if (!in_fp32 || !is_half(input)) return input + output;
  return (input.to(at::kFloat) + output.to(at::kFloat)).to(output.scalar_type());
}

// Gives Linears normal values, and biases of zero.
void begin_normal(const torch::nn::Module& module, double deviation) {
  for (const auto& part : module.children()) {
    auto* linear = dynamic_cast<torch::nn::LinearImpl*>(part.get());
    if (linear == nullptr) continue;
    torch::nn::init::normal_(linear->weight, 0, deviation);
    if (linear->bias.defined()) torch::nn::init::zeros_(linear->bias);
  }
}

// ALiBi's slopes, of the first head the steepest: those of a power of two, of which others take every second.
at::Tensor slopes(std::int64_t heads, double most) {
  const auto power = static_cast<std::int64_t>(std::exp2(std::ceil(std::log2(static_cast<double>(heads)))));
  const auto all =
      at::pow(2.0, -most * (at::arange(power, at::kDouble) + 1) / static_cast<double>(power)).to(at::kFloat);
  if (power == heads) return all;
  return at::cat({all.slice(0, 1, {}, 2), all.slice(0, 0, {}, 2)}).slice(0, 0, heads);
}

// Queries or keys whose first features are turned by their position: each pair of neighbours by another angle.
at::Tensor turned(const at::Tensor& heads, std::int64_t features) {
  const auto options = at::TensorOptions(at::kFloat).device(heads.device());
  const auto places = at::arange(heads.size(kPositions), options), pairs = at::arange(0, features, 2, options);
  const auto angles = places.unsqueeze(-1) * (1.0 / at::pow(10000, pairs / static_cast<double>(features)));
  const auto of_pairs = [&](const at::Tensor& values) {
    return values.repeat_interleave(2, -1).to(heads.scalar_type());
  };
  const auto turning = heads.slice(-1, 0, features), rest = heads.slice(-1, features);
  const auto across = at::stack({-turning.slice(-1, 1, {}, 2), turning.slice(-1, 0, {}, 2)}, -1).flatten(-2);
  return at::cat({turning * of_pairs(angles.cos()) + across * of_pairs(angles.sin()), rest}, -1);
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
  if (options.add_input) output = added(input, output, options.fp32_residual_addition);
  return part.layernorm.is_empty() ? output : part.layernorm(output, positions > 0);
}

at::Tensor activated(const std::string& name, const at::Tensor& x) {
  if (name == "gelu") return at::gelu(x);
  return name == "relu" ? at::relu(x) : at::gelu(x, "tanh");
}

}  // namespace

DistributedAttentionLayerImpl::DistributedAttentionLayerImpl(const TransformerOptions& options) : options_(options) {
  const auto hidden = options.hidden_size, size = options.attention_head_size;
  const auto inside = options.num_attention_heads * size;
  if (inside < 1 || hidden < 1)
    throw base::UsageError("num_attention_heads, attention_head_size and hidden_size are above 0",
                           base::Code{"tp-layer"});
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
  auto queries = in_heads(query, normed), keys = in_heads(key, seen);
  const auto values = in_heads(value, seen);
  if (options_.rotary_dim && !options_.cross_attention) {
    queries = turned(queries, *options_.rotary_dim);
    keys = turned(keys, *options_.rotary_dim);
  }
  const auto found = attended(queries, keys, values, mask);
  const auto output = summed(dense, found.transpose(kHeads, kPositions).flatten(2), positions);
  return finished(*this, options_, states, output, positions);
}

at::Tensor DistributedAttentionLayerImpl::attended(at::Tensor query, at::Tensor key, at::Tensor value,
                                                   const at::Tensor& mask) const {
  const auto dtype = value.scalar_type();
  if (options_.attention_in_fp32 && is_half(value)) {
    query = query.to(at::kFloat);
    key = key.to(at::kFloat);
    value = value.to(at::kFloat);
  }
  const auto queries = query.size(kPositions), keys = key.size(kPositions);
  const bool has_order = !options_.cross_attention;
  const bool is_causal = options_.causal_mask_size && has_order;
  if (is_causal && keys > *options_.causal_mask_size) {
    throw faces::refusal("too-many-positions", keys, *options_.causal_mask_size);
  }
  if (mask.defined() && mask.scalar_type() == at::kBool) {
    throw faces::refusal("mask-of-booleans");
  }
  auto bias = mask.defined() ? mask.to(query.scalar_type()) : mask;
  const bool has_slopes = options_.use_alibi && has_order;
  const bool has_window = is_causal && options_.window_size && *options_.window_size < keys;
  if (!has_slopes && !has_window && !(is_causal && mask.defined())) {
    return of_heads(query, key, value, bias, is_causal).to(dtype);
  }
  const auto places = at::arange(keys, at::TensorOptions(at::kLong).device(query.device()));
  const auto distance = places.slice(0, keys - queries).unsqueeze(-1) - places;
  auto own = at::zeros({1, 1, queries, keys}, query.options());
  if (has_slopes) {
    const auto all = slopes(options_.num_attention_heads, options_.alibi_bias_max);
    const auto here = all.slice(0, heads_.begin, heads_.end).to(query.options());
    own = own - here.unsqueeze(-1).unsqueeze(-1) * distance.abs();
  }
  if (is_causal) {
    const auto unseen = distance.lt(0);
    own = own.masked_fill(has_window ? unseen.logical_or(distance.ge(*options_.window_size)) : unseen, kLowest);
  }
  return of_heads(query, key, value, bias.defined() ? own + bias : own, false).to(dtype);
}

// Where slices have dropout, as torch computes it where no kernel of its own has that.
at::Tensor DistributedAttentionLayerImpl::of_heads(const at::Tensor& query, const at::Tensor& key,
                                                   const at::Tensor& value, const at::Tensor& mask,
                                                   bool is_causal) const {
  const double dropout = is_training() ? options_.attention_dropout_prob : 0;
  if (!member() || dropout == 0) {
    const auto given = mask.defined() ? std::optional(mask) : std::nullopt;
    return at::scaled_dot_product_attention(query, key, value, given, dropout, is_causal, options_.scale);
  }
  const double scale = options_.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
  const double factor = std::sqrt(scale);
  auto scores = at::matmul(query * factor, (key * factor).transpose(-2, -1));
  if (is_causal) {
    const auto seen = at::ones({query.size(kPositions), key.size(kPositions)}, query.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(seen.logical_not(), kLowest);
  } else if (mask.defined()) {
    scores = scores + mask;
  }
  return at::matmul(
      tensor_parallel::dropout_of_part(at::softmax(scores, -1), dropout, kHeads, heads_, options_.num_attention_heads),
      value);
}

DistributedTransformerOutputLayerImpl::DistributedTransformerOutputLayerImpl(const TransformerOptions& options)
    : options_(options) {
  const auto& name = options.activation;
  if (name != "gelu" && name != "gelu_new" && name != "relu") {
    throw faces::refusal("other-activation", "gelu, gelu_new, relu", name);
  }
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
  const auto inside = activated(options_.activation, dense1(ready(member(), normed, positions)));
  return finished(*this, options_, states, summed(dense2, inside, positions), positions);
}

}  // namespace lamina::nn
