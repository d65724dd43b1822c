// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/frontend/child.h"
#include "lamina/frontend/sliced_layers.h"
#include "lamina/layers/operators.h"
#include "lamina/layers/options.h"

// Shapes: N samples, S positions, H features, h heads on this rank, D features of a head, V words.
namespace lamina::nn {

using layers::TransformerOptions;

// Attention whose heads are cut, and what is around it: norms, dropout, and the sum with what it is given.
class DistributedAttentionLayerImpl : public torch::nn::Module, public frontend::Sliced {
 public:
  // Throws base::UsageError for options that it cannot have.
  explicit DistributedAttentionLayerImpl(const TransformerOptions& options);

  // States [N, S, H]; a mask that is added to scores, [N, 1, 1, S], or undefined; with cross_attention other states,
  // and their mask. Returns [N, S, H]. Throws base::UsageError for a mask of booleans, and for more positions than
  // causal_mask_size. `positions`: states, and the result, are this rank's part of so many; 0: they are whole.
  at::Tensor forward(const at::Tensor& states, const at::Tensor& mask = {}, const at::Tensor& others = {},
                     std::int64_t positions = 0);

  void begin(const frontend::Member& member) override;

  SlicedLinear query{nullptr}, key{nullptr}, value{nullptr}, dense{nullptr};
  Child<DistributedDropout> dropout;
  Child<DistributedLayerNorm> pre_layernorm, layernorm;  // empty for none

 private:
  at::Tensor in_heads(SlicedLinear& layer, const at::Tensor& given) const;
  layers::AttentionArguments arguments() const;

  const TransformerOptions options_;
  layout::Share heads_;  // here
};
TORCH_MODULE(DistributedAttentionLayer);

// Two Linears with a function between them, and what is around them. What lies between is cut.
class DistributedTransformerOutputLayerImpl : public torch::nn::Module, public frontend::Sliced {
 public:
  // Throws base::UsageError for options that it cannot have.
  explicit DistributedTransformerOutputLayerImpl(const TransformerOptions& options);

  // Takes and gives states [N, S, H]; `positions`: see DistributedAttentionLayer.
  at::Tensor forward(const at::Tensor& states, std::int64_t positions = 0);

  SlicedLinear dense1{nullptr}, dense2{nullptr};
  Child<DistributedDropout> dropout;
  Child<DistributedLayerNorm> pre_layernorm, layernorm;  // empty for none

 private:
  const TransformerOptions options_;
};
TORCH_MODULE(DistributedTransformerOutputLayer);

}  // namespace lamina::nn
