// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lamina/frontend/child.h"
#include "lamina/frontend/sliced_layers.h"

// Shapes: N samples, S positions, H features, h heads on this rank, D features of a head, V words.
namespace lamina::nn {

// Arguments of a transformer and its parts, by Python's names; each part reads those that are its own. Sizes are of the
// whole.
struct TransformerOptions {
  // Arguments of all parts.
  std::int64_t hidden_size = 1024;
  double hidden_dropout_prob = 0.1;  // of dropout of a part's result, before it is added
  double layernorm_epsilon = 1e-5;
  double initializer_range = 0.02;         // the standard deviation of weights, with
  bool use_normal_initialization = false;  // normal values, and biases of zero; else they begin as torch's
  bool pre_layernorm = false;              // a norm of each part's input
  bool post_layernorm = true;              // and one of its result
  bool fp32_residual_addition = false;     // sums are float32 where the states are half
  bool add_input = true;                   // of a part alone: its result is added to what it is given

  // Arguments of attention.
  std::int64_t num_attention_heads = 32;
  std::int64_t attention_head_size = 32;
  double attention_dropout_prob = 0.1;           // of dropout of the probabilities
  std::optional<std::int64_t> causal_mask_size;  // the longest sequence, of which a position sees those before it
  std::optional<std::int64_t> window_size;       // how many of these, with itself; all without it
  bool use_alibi = false;                        // scores fall with the distance (ALiBi)
  double alibi_bias_max = 8;                     // by how much the first head's do
  bool attention_in_fp32 = false;                // scores and probabilities are float32 where the states are half
  std::optional<double> scale;                   // what scores are multiplied by; else 1 / sqrt(attention_head_size)
  bool qkv_bias = true;
  bool dense_bias = true;
  std::optional<std::int64_t> rotary_dim;  // how many features of a head turn with the position, as GPT-J has it
  bool cross_attention = false;            // of attention alone: keys and values come from other states

  // Arguments of an output layer.
  std::int64_t intermediate_size = 4096;
  std::string activation = "gelu";  // or "gelu_new", "relu"

  // Arguments of a transformer's layers.
  int num_layers = 12;
  bool add_cross_attention = false;   // there is attention to other states
  bool parallel_attn_output = false;  // both parts take the same, behind one norm, and the three are added

  // Arguments of a language model.
  std::int64_t vocab_size = 30522;
  std::int64_t num_positions = 1024;             // 0: no embedding of positions
  std::int64_t num_token_types = 0;              // 0: none of types of tokens
  std::optional<double> embedding_dropout_prob;  // else hidden_dropout_prob
  bool add_lm_head = true;                       // the model gives scores of words; else states
  bool tie_lm_head = true;                       // by the embedding's weight
  bool lm_head_bias = false;
};

// Attention whose heads are cut, and what is around it: norms, dropout, and the sum with what it is given.
class DistributedAttentionLayerImpl : public torch::nn::Module, public frontend::Sliced {
 public:
  // Throws base::UsageError for sizes that are none.
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
  at::Tensor attended(at::Tensor query, at::Tensor key, at::Tensor value, const at::Tensor& mask) const;
  at::Tensor of_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask,
                      bool is_causal) const;

  const TransformerOptions options_;
  layout::Share heads_;  // here
};
TORCH_MODULE(DistributedAttentionLayer);

// Two Linears with a function between them, and what is around them. What lies between is cut.
class DistributedTransformerOutputLayerImpl : public torch::nn::Module, public frontend::Sliced {
 public:
  // Throws base::UsageError for an activation that is none.
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
