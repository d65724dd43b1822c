// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/forwards.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/tensor.h>

#include "lamina/tensor_parallel/operators.h"

namespace lamina::tensor_parallel {
namespace {

// Some outputs of a layer that is whole on all members. Its gradients are added.
at::Tensor chosen_outputs(const LayerCut& cut, const std::string& team, const at::Tensor& input,
                          const at::Tensor& weight, const at::Tensor& bias) {
  const auto chosen = at::tensor(*cut.chosen, at::TensorOptions(at::kLong).device(weight.device()));
  const auto own_rows = [&](const at::Tensor& each) {
    return each.defined() ? copy(each, team).index_select(0, chosen) : each;
  };
  return at::linear(cut.by_parent ? input : copy(input, team), own_rows(weight), own_rows(bias));
}

// Some words of an embedding: the others' are zero here, and the members' are added.
at::Tensor own_words(const LayerCut& cut, const std::string& team, const at::Tensor& words, const at::Tensor& slice) {
  const auto own = words - cut.part.first;
  const auto is_known = words.ge(0).logical_and(words.lt(cut.part.all));
  const auto is_elsewhere = own.lt(0).logical_or(own.ge(slice.size(0))).logical_and(is_known);
  const auto output = at::embedding(slice, own.masked_fill(is_elsewhere, 0), cut.padding.value_or(-1));
  return all_reduce(output.masked_fill(is_elsewhere.unsqueeze(-1), 0), team);
}

}  // namespace

at::Tensor linear(const LayerCut& cut, const std::string& team, const at::Tensor& input, const at::Tensor& weight,
                  const at::Tensor& bias) {
  if (cut.chosen) return chosen_outputs(cut, team, input, weight, bias);
  const bool is_gathered = cut.style == "colwise_gather_output";
  if (is_gathered || is_by_columns(cut.style)) {
    const auto output = at::linear(cut.by_parent ? input : copy(input, team), own(weight), own(bias));
    return is_gathered ? gather(output, {-1, cut.sizes}, team) : output;
  }
  const auto part = cut.style == "rowwise" ? input : scatter(input, {-1, cut.sizes}, team);
  const auto sum = all_reduce(at::linear(part, own(weight)), team);
  return bias.defined() ? sum + bias.to(sum.scalar_type()) : sum;  // which autocast has chosen
}

at::Tensor embedding(const LayerCut& cut, const std::string& team, const at::Tensor& words, const at::Tensor& weight) {
  const auto slice = own(weight);
  if (cut.style == "rowwise" || cut.style == "embedding_rowwise") return own_words(cut, team, words, slice);
  const auto output = at::embedding(slice, words, cut.padding.value_or(-1));
  return cut.style == "colwise" ? output : gather(output, {-1, cut.sizes}, team);
}

}  // namespace lamina::tensor_parallel
