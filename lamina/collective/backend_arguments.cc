// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/backend_arguments.h"

#include <ATen/EmptyTensor.h>

#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/value/dtype.h"

namespace lamina::collective {

bool has_memory(const at::Tensor& tensor) {
  const auto bytes =
      at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  return tensor.storage().nbytes() >= bytes;
}

shared_memory::Reduction reduction_of(CollectiveKind kind, const c10d::ReduceOp& operation) {
  using shared_memory::Reduction;
  switch (operation) {
    case c10d::ReduceOp::SUM:
      return Reduction::kSum;
    case c10d::ReduceOp::AVG:
      return Reduction::kMean;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::kProduct;
    case c10d::ReduceOp::MIN:
      return Reduction::kMin;
    case c10d::ReduceOp::MAX:
      return Reduction::kMax;
    case c10d::ReduceOp::BAND:
      return Reduction::kBitAnd;
    case c10d::ReduceOp::BOR:
      return Reduction::kBitOr;
    case c10d::ReduceOp::BXOR:
      return Reduction::kBitXor;
    default:
      throw base::UsageError(
          base::str(kind.name, " has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR, not this reduction"));
  }
}

void require_dense(CollectiveKind kind, const at::Tensor& tensor) {
  const char* what = !tensor.defined()                        ? "no tensor"
                     : !devices::is_host(tensor)              ? "one of another device"
                     : tensor.layout() != at::kStrided        ? "a sparse one"
                     : !value::dtype_of(tensor.scalar_type()) ? "one of another dtype"
                     : !has_memory(tensor)                    ? "one whose storage was freed"
                                                              : nullptr;
  if (what == nullptr) return;
  const auto given = tensor.defined() ? base::str(": ", tensor.scalar_type(), " on ", tensor.device().str()) : "";
  throw base::UsageError(base::str(kind.name, " takes dense tensors of the CPU, not ", what, given));
}

void require_alike(CollectiveKind kind, const at::Tensor& one, const at::Tensor& other) {
  if (one.scalar_type() == other.scalar_type()) return;
  throw base::UsageError(base::str(kind.name, ": tensors of ", one.scalar_type(), " and ", other.scalar_type()));
}

const at::Tensor& only(CollectiveKind kind, const Tensors& tensors) {
  if (tensors.size() != 1) throw base::UsageError(base::str(kind.name, " takes one tensor, not ", tensors.size()));
  require_dense(kind, tensors.front());
  return tensors.front();
}

shared_memory::Reduction reduction_for(CollectiveKind kind, const at::Tensor& tensor, const c10d::ReduceOp& operation) {
  const auto reduction = reduction_of(kind, operation);
  if (shared_memory::reducible(*value::dtype_of(tensor.scalar_type()), reduction)) return reduction;
  throw base::UsageError(base::str(kind.name, ": elements of ", tensor.scalar_type(), " have no such reduction"));
}

void require_as_many(CollectiveKind kind, std::size_t given, std::size_t expected) {
  if (given == expected) return;
  throw base::UsageError(base::str(kind.name, ": ", given, " tensors in place of ", expected));
}

void require_parts(CollectiveKind kind, const Tensors& all, const Tensors& mine, int size) {
  require_as_many(kind, all.size(), mine.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    require_dense(kind, all[i]);
    require_dense(kind, mine[i]);
    require_alike(kind, all[i], mine[i]);
    if (all[i].numel() == mine[i].numel() * size) continue;
    throw base::UsageError(
        base::str(kind.name, ": a tensor of ", all[i].numel(), " elements for ", size, " parts of ", mine[i].numel()));
  }
}

Tensors list_of(CollectiveKind kind, const std::vector<Tensors>& lists, const at::Tensor& mine, int size) {
  require_as_many(kind, lists.size(), 1);
  require_list(kind, lists.front(), mine, size);
  return lists.front();
}

void require_list(CollectiveKind kind, const Tensors& parts, const at::Tensor& mine, int size) {
  require_as_many(kind, parts.size(), size);
  for (const auto& part : parts) {
    require_dense(kind, part);
    require_alike(kind, part, mine);
    if (part.numel() == mine.numel()) continue;
    throw base::UsageError(base::str(kind.name, ": a part of ", part.numel(), " elements beside one of ", mine.numel(),
                                     ": all are of one size"));
  }
}

std::vector<std::size_t> counts_of(const at::Tensor& tensor, const std::vector<std::int64_t>& rows, int size) {
  require_dense(kAllToAllTensor, tensor);
  const std::int64_t all = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::int64_t sum = 0;
  bool fits = rows.empty() ? all % size == 0 : std::cmp_equal(rows.size(), size);
  for (const auto each : rows) {
    fits = fits && each >= 0;
    sum += each;
  }
  if (!fits || (!rows.empty() && sum != all)) {
    throw base::UsageError(base::str(kAllToAllTensor.name, ": ", all, " rows cannot be parted over ", size, " members ",
                                     rows.empty() ? "equally" : "as the sizes say"));
  }
  const std::int64_t row = all == 0 ? 0 : tensor.numel() / all;
  std::vector<std::size_t> counts(size, static_cast<std::size_t>(all / size * row));
  for (std::size_t i = 0; i < rows.size(); ++i) counts[i] = static_cast<std::size_t>(rows[i] * row);
  return counts;
}

int require_member(CollectiveKind kind, std::int64_t index, int size) {
  if (index >= 0 && index < size) return static_cast<int>(index);
  throw base::UsageError(base::str(kind.name, ": there is no member ", index, "; expected 0 to ", size - 1));
}

}  // namespace lamina::collective
