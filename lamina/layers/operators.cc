// SPDX-License-Identifier: Apache-2.0
#include "lamina/layers/operators.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/relu.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

#include "lamina/faces/sayings.h"

namespace lamina::layers {
namespace {

constexpr std::int64_t kNoLabel = -100;

bool is_half(const at::Tensor& tensor) { return c10::elementSize(tensor.scalar_type()) < sizeof(float); }

struct Activation {
  const char* name;
  at::Tensor (*function)(const at::Tensor&);
};

constexpr Activation kActivations[] = {
    {"gelu", [](const at::Tensor& input) { return at::gelu(input); }},
    {"gelu_new", [](const at::Tensor& input) { return at::gelu(input, "tanh"); }},
    {"relu", [](const at::Tensor& input) { return at::relu(input); }},
};

const Activation* find_activation(const std::string& name) {
  const auto* found = std::ranges::find(kActivations, name, &Activation::name);
  return found == std::end(kActivations) ? nullptr : found;
}

double lowest(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return static_cast<double>(std::numeric_limits<at::Half>::lowest());
    case at::kBFloat16:
      return static_cast<double>(std::numeric_limits<at::BFloat16>::lowest());
    case at::kFloat:
      return static_cast<double>(std::numeric_limits<float>::lowest());
    default:
      return std::numeric_limits<double>::lowest();
  }
}

at::Tensor attention_of_arguments(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                  const std::optional<at::Tensor>& mask, double dropout_p, bool cross_attention,
                                  std::optional<c10::SymInt> causal_mask_size, std::optional<std::int64_t> window_size,
                                  bool use_alibi, double alibi_bias_max, std::optional<std::int64_t> rotary_dim,
                                  std::optional<double> scale, bool attention_in_fp32, std::int64_t first_head,
                                  std::optional<std::int64_t> all_heads) {
  return attention(query, key, value, mask,
                   {dropout_p, cross_attention, std::move(causal_mask_size), window_size, use_alibi, alibi_bias_max,
                    rotary_dim, scale, attention_in_fp32, first_head, all_heads});
}

TORCH_LIBRARY_FRAGMENT(lamina, library) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, *, float dropout_p=0., "
      "bool cross_attention=False, SymInt? causal_mask_size=None, int? window_size=None, bool use_alibi=False, "
      "float alibi_bias_max=8., int? rotary_dim=None, float? scale=None, bool attention_in_fp32=False, "
      "int first_head=0, int? all_heads=None) -> Tensor",
      &attention_of_arguments, tags);
  library.def("residual_sum(Tensor input, Tensor output, bool in_fp32) -> Tensor", &residual_sum, tags);
  library.def("activation(Tensor input, str name) -> Tensor", &activation, tags);
  library.def(
      "mixed_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) -> "
      "Tensor",
      &mixed_layer_norm, tags);
  library.def("padding_bias(Tensor mask, ScalarType dtype) -> Tensor", &padding_bias, tags);
  library.def("token_loss(Tensor scores, Tensor labels, bool is_causal, bool in_fp32) -> Tensor", &token_loss, tags);
}

}  // namespace

at::Tensor residual_sum(const at::Tensor& input, const at::Tensor& output, bool in_fp32) {
  if (!in_fp32 || !is_half(input)) return input + output;
  return (input.to(at::kFloat) + output.to(at::kFloat)).to(output.scalar_type());
}

std::vector<std::string> activations() {
  std::vector<std::string> names;
  for (const auto& each : kActivations) names.emplace_back(each.name);
  return names;
}

void require_activation(const std::string& name) {
  if (find_activation(name) != nullptr) return;
  std::string names;
  for (const auto& each : kActivations) names += (names.empty() ? "" : ", ") + std::string(each.name);
  throw faces::refusal("other-activation", names, name);
}

at::Tensor activation(const at::Tensor& input, const std::string& name) {
  require_activation(name);
  return find_activation(name)->function(input);
}

at::Tensor mixed_layer_norm(const at::Tensor& input, c10::SymIntArrayRef shape, const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias, double eps) {
  if (!weight || !bias || weight->scalar_type() == input.scalar_type() || !input.is_floating_point()) {
    return at::layer_norm_symint(input, shape, weight, bias, eps);
  }
  const auto dtype = c10::promoteTypes(weight->scalar_type(), input.scalar_type());
  const auto found = at::layer_norm_symint(input.to(dtype), shape, weight->to(dtype), bias->to(dtype), eps);
  return found.to(input.scalar_type());
}

at::Tensor padding_bias(const at::Tensor& mask, at::ScalarType dtype) {
  return mask.unsqueeze(1).unsqueeze(1).to(dtype) * lowest(dtype);
}

at::Tensor token_loss(const at::Tensor& scores, const at::Tensor& labels, bool is_causal, bool in_fp32) {
  // The last position has none. A row without a label in place of a shorter sum: transformers' order of additions.
  const auto next = is_causal ? at::constant_pad_nd(labels.slice(1, 1), {0, 1}, kNoLabel) : labels;
  const bool is_wide = c10::elementSize(scores.scalar_type()) > sizeof(float);
  const auto rows = scores.flatten(0, 1), given = is_wide && !in_fp32 ? rows : rows.to(at::kFloat);
  const auto loss =
      at::cross_entropy_loss(given, next.to(scores.device()).flatten(), {}, at::Reduction::Mean, kNoLabel);
  return is_wide ? loss.to(scores.scalar_type()) : loss;  // wide, so that a mean of several is not rounded
}

}  // namespace lamina::layers
