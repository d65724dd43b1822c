// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// [Note: operators of layers] The computations of transformers' layers, for both faces. They are made of torch's own
// operations, so gradients, autocast, tensors without values and compiled graphs are those of torch. Each is an
// operator of torch's dispatcher as well: `torch.ops.lamina.attention`, ...
//
// Shapes: N samples, S positions, H features, h heads on this rank, D features of a head, V words.
namespace lamina::layers {

// Arguments of attention beside tensors, by the names that layers have for them.
struct AttentionArguments {
  double dropout_p = 0;          // of the probabilities
  bool cross_attention = false;  // keys have another order, or none: nothing that has to do with places counts
  std::optional<c10::SymInt> causal_mask_size;  // the longest sequence, of which a position sees those before it
  std::optional<std::int64_t> window_size;      // how many of these, with itself; all without it
  bool use_alibi = false;                       // scores fall with the distance (ALiBi)
  double alibi_bias_max = 8;                    // by how much the first head's do
  std::optional<std::int64_t> rotary_dim;       // how many features of a head turn with the position, as GPT-J has it
  std::optional<double> scale;                  // what scores are multiplied by; else 1 / sqrt(D)
  bool attention_in_fp32 = false;               // scores and probabilities are float32 where the values are half
  std::int64_t first_head = 0;                  // here
  std::optional<std::int64_t> all_heads;        // of all ranks; nothing: all are here
};

// Attention of queries to keys and values [N, h, S, D], with a mask that is added to scores, if any: [N, 1 or h, 1 or
// S, S]. Dropout and ALiBi are those of these heads of all. Throws base::UsageError for a mask of booleans, and for
// more positions than causal_mask_size.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, const AttentionArguments& arguments);

// The sum of what a layer was given and what it has computed, in the type of these; `in_fp32`: halves are added as
// float32.
at::Tensor residual_sum(const at::Tensor& input, const at::Tensor& output, bool in_fp32);

// The names of activations.
std::vector<std::string> activations();
// Throws base::UsageError for a name that is none of them.
void require_activation(const std::string& name);
at::Tensor activation(const at::Tensor& input, const std::string& name);

// torch's LayerNorm, whose parameters may be of another floating-point type than its input. It computes in the type
// that both fit into; the result has the input's.
at::Tensor mixed_layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                            const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps);

// A mask [N, S], 1 where a position is not seen, as what is added to scores of a type: [N, 1, 1, S].
at::Tensor padding_bias(const at::Tensor& mask, at::ScalarType dtype);

// The mean cross entropy of scores [N, S, V] and labels [N, S], without labels of -100. `is_causal`: scores of a
// position are for the label of the next one. It is computed in float32, or in the scores' type where that is wider,
// unless `in_fp32`.
at::Tensor token_loss(const at::Tensor& scores, const at::Tensor& labels, bool is_causal, bool in_fp32);

}  // namespace lamina::layers
