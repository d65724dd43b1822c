// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "lamina/value/bytes.h"
#include "lamina/value/value.h"

// The tensors of one tree as views of as few buffers as they have storages: see [Note: aliases] in encoding.h.
namespace lamina::value {

class TensorTable {
 public:
  // Collects the distinct tensors of `tree`.
  explicit TensorTable(const Value& tree);

  // The place of `tensor` in the table.
  std::uint32_t index(const at::Tensor& tensor) const;

  // Writes one row per tensor and returns the buffers that the rows speak of.
  std::vector<at::Tensor> write(Writer& out) const;

  // The tensors of a written table, as views of `buffers`. Throws base::FormatError when they do not fit.
  static std::vector<at::Tensor> read(Reader& in, const std::vector<at::Tensor>& buffers);

 private:
  std::vector<at::Tensor> tensors_;
  std::unordered_map<const void*, std::uint32_t> index_;
};

}  // namespace lamina::value
