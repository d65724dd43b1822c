// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/sparse.h"

#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::collective {
namespace {

// A description of a sparse tensor, of the same length for any: type, kinds of dimensions, sizes, and last how many
// positions it has.
constexpr std::int64_t kMostDimensions = 64;

at::Tensor describe(const at::Tensor& tensor) {
  std::vector<std::int64_t> about{static_cast<std::int64_t>(tensor.scalar_type()), tensor.sparse_dim(),
                                  tensor.dense_dim()};
  if (tensor.dim() > kMostDimensions) {
    throw base::UsageError(
        base::str("a sparse tensor of ", tensor.dim(), " dimensions: ", kMostDimensions, " at most"));
  }
  about.insert(about.end(), tensor.sizes().begin(), tensor.sizes().end());
  about.resize(kMostDimensions + 3);
  about.push_back(tensor._nnz());
  return at::tensor(about, at::kLong);
}

// With zeros after it along a dimension, so that it is so long.
at::Tensor padded(const at::Tensor& tensor, std::int64_t dimension, std::int64_t length) {
  auto shape = tensor.sizes().vec();
  shape[dimension] = length;
  auto longer = tensor.new_zeros(shape);
  longer.narrow(dimension, 0, tensor.size(dimension)).copy_(tensor);
  return longer;
}

}  // namespace

at::Tensor sum_of_sparse(const at::Tensor& mine, const GatherDense& gather) {
  const auto own = mine.coalesce();
  const auto about = gather(describe(own));
  std::vector<std::int64_t> counts;
  for (const auto& each : about) {
    const auto shape = each.numel() - 1;
    counts.push_back(each[shape].item<std::int64_t>());
    if (each.narrow(0, 0, shape).equal(about.front().narrow(0, 0, shape))) continue;
    throw base::UsageError("sparse tensors of different shapes or types are added up over ranks");
  }
  const auto most = *std::ranges::max_element(counts);
  if (most == 0) return own;
  const auto indices = gather(padded(own.indices(), 1, most));
  const auto values = gather(padded(own.values(), 0, most));
  at::Tensor sum;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const auto part = at::sparse_coo_tensor(indices[i].narrow(1, 0, counts[i]), values[i].narrow(0, 0, counts[i]),
                                            own.sizes(), own.options(), /*is_coalesced=*/true);
    sum = sum.defined() ? sum.add(part) : part;
  }
  return sum.coalesce();
}

}  // namespace lamina::collective
