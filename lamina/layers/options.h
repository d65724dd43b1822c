// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

// Arguments of transformers and their parts, for both faces: names, defaults, who reads them, and what is refused.
namespace lamina::layers {

// Each part reads those that are its own. Sizes are of the whole.
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
  std::int64_t num_layers = 12;
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
  bool loss_in_fp32 = false;  // the loss of wider scores is float32, too, as that of transformers' models
};

// An option by its name.
struct Option {
  template <class Value>
  using Of = Value TransformerOptions::*;

  std::string_view name;
  std::variant<Of<bool>, Of<std::int64_t>, Of<double>, Of<std::string>, Of<std::optional<std::int64_t>>,
               Of<std::optional<double>>>
      field;
};

std::span<const Option> every_option();

// One of a layer's arguments.
struct LayerArgument {
  Option option;
  bool takes_place = true;  // it may be given by its place
};

// The arguments of a layer, by the name of its class, in their order. Throws base::InternalError for another name.
std::vector<LayerArgument> arguments_of(std::string_view layer);

// The options of a layer's attention, or of its output.
TransformerOptions options_of_part(const TransformerOptions& layer);

// Throws base::UsageError for options that a layer reads and cannot have.
void check(std::string_view layer, const TransformerOptions& options);

}  // namespace lamina::layers
