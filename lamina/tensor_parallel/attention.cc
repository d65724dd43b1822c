// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/attention.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <c10/core/SymInt.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "lamina/tensor_parallel/dropout.h"

namespace lamina::tensor_parallel {
namespace {

constexpr int kHeads = -3;  // of queries, and of probabilities [..., heads, queries, keys]
constexpr double kLowest = -std::numeric_limits<double>::infinity();

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const std::optional<at::Tensor>& mask, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa, std::int64_t first, std::int64_t all) {
  return attention_of_heads(query, key, value, mask, {dropout_p, is_causal, scale, enable_gqa}, HeadsHere{first, all});
}

TORCH_LIBRARY_FRAGMENT(lamina, library) {
  library.def(
      "tp_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, bool is_causal, "
      "float? scale, bool enable_gqa, int first, int all) -> Tensor",
      &attention, {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
}

}  // namespace

at::Tensor attention_of_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const std::optional<at::Tensor>& mask, const AttentionTerms& terms,
                              const std::optional<HeadsHere>& heads) {
  if (!heads || terms.dropout_p == 0) {
    return at::scaled_dot_product_attention(query, key, value, mask, terms.dropout_p, terms.is_causal, terms.scale,
                                            terms.enable_gqa);
  }
  const auto known = [](const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); };
  const auto groups = terms.enable_gqa ? known(query.sym_size(kHeads)) / known(key.sym_size(kHeads)) : 1;
  const auto of_queries = [&](const at::Tensor& each) {
    return groups == 1 ? each : each.repeat_interleave(groups, kHeads);
  };
  // As torch computes it where no kernel of its own has dropout.
  const auto features = known(query.sym_size(-1));
  const double factor = std::sqrt(terms.scale.value_or(1 / std::sqrt(static_cast<double>(features))));
  auto scores = at::matmul(query * factor, (of_queries(key) * factor).transpose(-2, -1));
  const auto hide = [&](const at::Tensor& seen) { scores = scores.masked_fill(seen.logical_not(), kLowest); };
  if (terms.is_causal) {
    hide(at::ones_symint({query.sym_size(-2), key.sym_size(-2)}, query.options().dtype(at::kBool)).tril());
  } else if (mask) {
    if (mask->scalar_type() == at::kBool) {
      hide(*mask);
    } else {
      scores = scores + *mask;
    }
  }
  const auto kept = dropout_of_part(at::softmax(scores, -1), terms.dropout_p, kHeads, heads->first,
                                    query.sym_size(kHeads), heads->all);
  return at::matmul(kept, of_queries(value));
}

}  // namespace lamina::tensor_parallel
