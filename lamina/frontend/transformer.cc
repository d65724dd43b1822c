// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/transformer.h"

#include <ATen/ops/arange.h>
#include <torch/nn/init.h>

#include "lamina/faces/sayings.h"
#include "lamina/layers/operators.h"
#include "lamina/tensor_parallel/operators.h"

namespace lamina::nn {
namespace {

// A mask [N, S], 1 where a position is not seen, as what is added to scores: [N, 1, 1, S].
at::Tensor added_mask(const at::Tensor& mask, const at::Tensor& states) {
  return mask.defined() ? layers::padding_bias(mask, states.scalar_type()) : mask;
}

}  // namespace

DistributedTransformerLayerImpl::DistributedTransformerLayerImpl(const TransformerOptions& options) {
  layers::check("DistributedTransformerLayer", options);
  auto part = layers::options_of_part(options);
  attention = register_module("attention", DistributedAttentionLayer(part));
  if (options.add_cross_attention) {
    part.cross_attention = true;
    cross_attention = register_module("cross_attention", DistributedAttentionLayer(part));
  }
  output = register_module("output", DistributedTransformerOutputLayer(part));
  if (options.parallel_attn_output) {
    layernorm = register_module("layernorm", DistributedLayerNorm(options.hidden_size, options.layernorm_epsilon));
  }
}

at::Tensor DistributedTransformerLayerImpl::forward(const at::Tensor& states, const at::Tensor& mask,
                                                    const at::Tensor& others, const at::Tensor& mask_of_others,
                                                    std::int64_t positions) {
  if (others.defined() && cross_attention.is_empty()) throw faces::refusal("unused-states");
  if (!layernorm.is_empty()) {
    const auto normed = layernorm(states, positions > 0);
    // First, as in Python: the backward adds in the opposite order.
    const auto attended = attention(normed, mask, at::Tensor(), positions);
    return attended + output(normed, positions) + states;
  }
  auto found = attention(states, mask, at::Tensor(), positions);
  if (others.defined()) found = cross_attention(found, mask_of_others, others, positions);
  return output(found, positions);
}

TransformerLayersImpl::TransformerLayersImpl(const TransformerOptions& options) {
  for (std::int64_t i = 0; i < options.num_layers; ++i) push_back(DistributedTransformerLayer(options));
}

at::Tensor TransformerLayersImpl::forward(at::Tensor states, const at::Tensor& mask, const at::Tensor& others,
                                          const at::Tensor& mask_of_others, std::int64_t positions) {
  for (auto& layer : *this) states = layer(states, mask, others, mask_of_others, positions);
  return states;
}

DistributedTransformerImpl::DistributedTransformerImpl(const TransformerOptions& options) {
  seq_layers = register_module("seq_layers", TransformerLayers(options));
}

at::Tensor DistributedTransformerImpl::forward(const at::Tensor& states, const at::Tensor& mask,
                                               const at::Tensor& others, const at::Tensor& mask_of_others) {
  if (!member() || !member()->in_parts) return seq_layers(states, mask, others, mask_of_others, 0);
  const auto positions = states.size(1);
  const auto cut = member()->cut(positions);
  const auto part = tensor_parallel::scatter(states, cut, member()->team);
  return tensor_parallel::gather(seq_layers(part, mask, others, mask_of_others, positions), cut, member()->team);
}

DistributedTransformerLMHeadImpl::DistributedTransformerLMHeadImpl(const TransformerOptions& options)
    : is_causal_(options.causal_mask_size.has_value()), loss_in_fp32_(options.loss_in_fp32) {
  layers::check("DistributedTransformerLMHead", options);
  const auto hidden = options.hidden_size;
  word_embedding = register_module("word_embedding", SlicedEmbedding(options.vocab_size, hidden));
  std::vector<at::Tensor> weights{word_embedding->weight};
  const auto embedding = [&](const char* name, std::int64_t count) {
    auto made = register_module(name, torch::nn::Embedding(count, hidden));
    weights.push_back(made->weight);
    return made;
  };
  if (options.num_positions > 0) position_embedding = embedding("position_embedding", options.num_positions);
  if (options.num_token_types > 0) token_type_embedding = embedding("token_type_embedding", options.num_token_types);
  for (const auto& weight : weights) torch::nn::init::normal_(weight, 0, options.initializer_range);
  dropout = register_module("dropout",
                            torch::nn::Dropout(options.embedding_dropout_prob.value_or(options.hidden_dropout_prob)));
  transformer = register_module("transformer", DistributedTransformer(options));
  if (!options.post_layernorm) {
    layernorm = register_module("layernorm", DistributedLayerNorm(hidden, options.layernorm_epsilon));
  }
  if (!options.add_lm_head) return;
  lm_head = register_module(
      "lm_head", SlicedLinear(hidden, options.vocab_size, Style::kColwiseGatherOutput, options.lm_head_bias));
  if (options.tie_lm_head) lm_head->tie(word_embedding->weight);
}

at::Tensor DistributedTransformerLMHeadImpl::forward(const at::Tensor& words, const at::Tensor& mask,
                                                     const at::Tensor& types, const at::Tensor& positions,
                                                     const at::Tensor& others, const at::Tensor& mask_of_others) {
  auto states = word_embedding(words);
  if (!position_embedding.is_empty()) {
    const auto from_first = [&] { return at::arange(words.size(-1), words.options().dtype(at::kLong)); };
    states = states + position_embedding(positions.defined() ? positions : from_first());
  }
  if (types.defined() && !token_type_embedding.is_empty()) states = states + token_type_embedding(types);
  states = dropout(states);
  states = transformer(states, added_mask(mask, states), others, added_mask(mask_of_others, states));
  if (!layernorm.is_empty()) states = layernorm(states);
  return lm_head.is_empty() ? states : lm_head(states);
}

at::Tensor DistributedTransformerLMHeadImpl::loss(const at::Tensor& scores, const at::Tensor& labels) const {
  return layers::token_loss(scores, labels, is_causal_, loss_in_fp32_);
}

}  // namespace lamina::nn
