// SPDX-License-Identifier: Apache-2.0
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <c10/core/DefaultDtype.h>

#include <cmath>
#include <limits>

#include "lamina/faces/sayings.h"
#include "lamina/layers/operators.h"
#include "lamina/tensor_parallel/attention.h"

namespace lamina::layers {
namespace {

constexpr int kHeads = 1, kPositions = 2;  // of queries and keys [N, h, S, D]
constexpr double kLowest = -std::numeric_limits<double>::infinity();
constexpr double kRotaryBase = 10000;

// ALiBi's slopes, of the first head the steepest: those of a power of two, of which others take every second.
at::Tensor alibi_slopes(std::int64_t heads, double most) {
  const auto power = static_cast<std::int64_t>(std::exp2(std::ceil(std::log2(static_cast<double>(heads)))));
  const auto exponents = -most * (at::arange(power, at::kDouble) + 1) / static_cast<double>(power);
  const auto all = at::pow(2.0, exponents).to(c10::get_default_dtype_as_scalartype());
  if (power == heads) return all;
  return at::cat({all.slice(0, 1, {}, 2), all.slice(0, 0, {}, 2)}).slice(0, 0, heads);
}

// Queries or keys whose first features are turned by their position: each pair of neighbours by another angle.
at::Tensor rotated(const at::Tensor& heads, std::int64_t features) {
  const auto options = at::TensorOptions(at::kFloat).device(heads.device());
  const auto places = at::arange(heads.sym_size(kPositions), options), pairs = at::arange(0, features, 2, options);
  const auto angles = places.unsqueeze(-1) * at::pow(kRotaryBase, pairs / static_cast<double>(features)).reciprocal();
  const auto of_pairs = [&](const at::Tensor& values) {
    return values.repeat_interleave(2, -1).to(heads.scalar_type());
  };
  const auto turning = heads.slice(-1, 0, features), rest = heads.slice(-1, features);
  const auto across = at::stack({-turning.slice(-1, 1, {}, 2), turning.slice(-1, 0, {}, 2)}, -1).flatten(-2);
  return at::cat({turning * of_pairs(angles.cos()) + across * of_pairs(angles.sin()), rest}, -1);
}

// Numbers that are added to scores, [N or 1, h or 1, S or 1, S]; nothing for none but those of a causal mask.
std::optional<at::Tensor> bias_of(const at::Tensor& query, const at::Tensor& key, std::optional<at::Tensor> mask,
                                  const AttentionArguments& arguments) {
  const auto queries = query.sym_size(kPositions), keys = key.sym_size(kPositions);
  const bool has_order = !arguments.cross_attention, has_slopes = has_order && arguments.use_alibi;
  const bool is_causal = has_order && arguments.causal_mask_size;
  const bool has_window = is_causal && arguments.window_size && keys > *arguments.window_size;
  if (mask) mask = mask->to(query.scalar_type());
  if (!has_slopes && !has_window && !(is_causal && mask)) return mask;
  const auto places = at::arange(keys, at::TensorOptions(at::kLong).device(query.device()));
  const auto distance = places.slice_symint(0, keys - queries).unsqueeze(-1) - places;
  auto bias = query.new_zeros_symint({1, 1, queries, keys});
  if (has_slopes) {
    const auto here = query.sym_size(kHeads).guard_int(__FILE__, __LINE__), first = arguments.first_head;
    const auto slopes = alibi_slopes(arguments.all_heads.value_or(here), arguments.alibi_bias_max);
    const auto own = slopes.slice(0, first, first + here).to(query.options());
    bias = bias - own.unsqueeze(-1).unsqueeze(-1) * distance.abs();
  }
  if (is_causal) {
    const auto unseen = distance.lt(0);
    bias = bias.masked_fill(has_window ? unseen.logical_or(distance.ge(*arguments.window_size)) : unseen, kLowest);
  }
  return mask ? bias + *mask : bias;
}

// Throws base::UsageError for what attention does not take.
void check(const at::Tensor& key, const std::optional<at::Tensor>& mask, const AttentionArguments& arguments) {
  const auto positions = key.sym_size(kPositions);
  const auto& longest = arguments.causal_mask_size;
  if (longest && !arguments.cross_attention && positions > *longest) {
    throw faces::refusal("too-many-positions", positions, *longest);
  }
  if (mask && mask->scalar_type() == at::kBool) throw faces::refusal("mask-of-booleans");
}

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, const AttentionArguments& arguments) {
  check(key, mask, arguments);
  const auto dtype = value.scalar_type();
  const bool is_widened = arguments.attention_in_fp32 && c10::elementSize(dtype) < sizeof(float);
  const auto ready = [&](at::Tensor heads, bool turns) {
    if (turns && arguments.rotary_dim && !arguments.cross_attention) heads = rotated(heads, *arguments.rotary_dim);
    return is_widened ? heads.to(at::kFloat) : heads;
  };
  const auto queries = ready(query, true), keys = ready(key, true), values = ready(value, false);
  const auto bias = bias_of(queries, keys, mask, arguments);
  const bool is_causal = arguments.causal_mask_size && !arguments.cross_attention && !bias;
  std::optional<tensor_parallel::HeadsHere> heads;
  if (arguments.all_heads) heads = {arguments.first_head, *arguments.all_heads};
  const auto found = tensor_parallel::attention_of_heads(queries, keys, values, bias,
                                                         {arguments.dropout_p, is_causal, arguments.scale}, heads);
  return is_widened ? found.to(dtype) : found;
}

}  // namespace lamina::layers
