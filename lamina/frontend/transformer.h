// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/frontend/attention.h"
#include "lamina/frontend/containers.h"

// Transformers whose layers are cut over the ranks of a TP_GROUP; shapes are those of attention.h.
namespace lamina::nn {

// Attention, with add_cross_attention that to other states, and an output layer.
class DistributedTransformerLayerImpl : public torch::nn::Module {
 public:
  // Throws base::UsageError for options that do not go together.
  explicit DistributedTransformerLayerImpl(const TransformerOptions& options);

  // States [N, S, H], a mask that is added to scores, [N, 1, 1, S] or undefined; with add_cross_attention other states
  // and their mask, where there are some; `positions`: see DistributedAttentionLayer. Returns [N, S, H]. Throws
  // base::UsageError for others without add_cross_attention.
  at::Tensor forward(const at::Tensor& states, const at::Tensor& mask = {}, const at::Tensor& others = {},
                     const at::Tensor& mask_of_others = {}, std::int64_t positions = 0);

  Child<DistributedAttentionLayer> attention, cross_attention;  // the latter may be empty
  Child<DistributedTransformerOutputLayer> output;
  Child<DistributedLayerNorm> layernorm;  // with parallel_attn_output
};
TORCH_MODULE(DistributedTransformerLayer);

// Layers of a transformer, one after the other; their names are "0", "1", ...
class TransformerLayersImpl : public ChildListImpl<DistributedTransformerLayer> {
 public:
  explicit TransformerLayersImpl(const TransformerOptions& options);
  at::Tensor forward(at::Tensor states, const at::Tensor& mask, const at::Tensor& others,
                     const at::Tensor& mask_of_others, std::int64_t positions);
};
TORCH_MODULE(TransformerLayers);

// Layers between which each rank has a part of the positions, with `optimize: memory`.
class DistributedTransformerImpl : public torch::nn::Module, public frontend::Sliced {
 public:
  explicit DistributedTransformerImpl(const TransformerOptions& options);

  // Takes what a layer takes, and returns what the last one does.
  at::Tensor forward(const at::Tensor& states, const at::Tensor& mask = {}, const at::Tensor& others = {},
                     const at::Tensor& mask_of_others = {});

  Child<TransformerLayers> seq_layers;
};
TORCH_MODULE(DistributedTransformer);

// Embeddings of words and positions, a transformer, and with add_lm_head scores of words. Embedding and head are cut
// over the words. Without post_layernorm there is one norm, after the last layer.
class DistributedTransformerLMHeadImpl : public torch::nn::Module {
 public:
  explicit DistributedTransformerLMHeadImpl(const TransformerOptions& options);

  // Words [N, S]. All others may be undefined: a mask [N, S], 1 where a position is not seen; types of tokens [N, S];
  // positions [N, S], else 0, 1, ...; other states and their mask, with add_cross_attention. Returns scores [N, S, V],
  // or states [N, S, H] without a head.
  at::Tensor forward(const at::Tensor& words, const at::Tensor& mask = {}, const at::Tensor& types = {},
                     const at::Tensor& positions = {}, const at::Tensor& others = {},
                     const at::Tensor& mask_of_others = {});

  // The mean cross entropy of scores, without labels of -100. With causal_mask_size scores of a position are for the
  // label of the next one. It is float32 where the scores are half, or loss_in_fp32 asks for that.
  at::Tensor loss(const at::Tensor& scores, const at::Tensor& labels) const;

  Child<SlicedEmbedding> word_embedding;
  Child<torch::nn::Embedding> position_embedding, token_type_embedding;  // empty for none
  Child<torch::nn::Dropout> dropout;
  Child<DistributedTransformer> transformer;
  Child<DistributedLayerNorm> layernorm;
  SlicedLinear lm_head{nullptr};  // lives with the model, and has the embedding's weight where it is tied

 private:
  const bool is_causal_, loss_in_fp32_;
};
TORCH_MODULE(DistributedTransformerLMHead);

}  // namespace lamina::nn
