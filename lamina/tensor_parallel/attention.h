// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace lamina::tensor_parallel {

// Arguments of torch's attention beside tensors.
struct AttentionTerms {
  double dropout_p = 0;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;
};

// The heads of queries that are here, from the first of them on, of all.
struct HeadsHere {
  std::int64_t first = 0;
  std::int64_t all = 0;
};

// torch's attention of queries, keys and values [..., heads, positions, features]; with `heads` dropout is that of
// these heads of all, see [Note: dropout of slices]. It is an operator of torch's dispatcher, too:
// `torch.ops.lamina.tp_attention`.
at::Tensor attention_of_heads(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                              const std::optional<at::Tensor>& mask, const AttentionTerms& terms,
                              const std::optional<HeadsHere>& heads);

}  // namespace lamina::tensor_parallel
