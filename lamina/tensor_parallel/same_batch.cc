// SPDX-License-Identifier: Apache-2.0
#include "lamina/tensor_parallel/same_batch.h"

#include <ATen/ops/full.h>

#include <algorithm>
#include <string_view>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"

namespace lamina::tensor_parallel {
namespace {

// A number that differs, almost surely, where a bit does.
std::int64_t checksum(std::span<const at::Tensor> tensors) {
  std::uint64_t sum = tensors.size();
  for (const auto& tensor : tensors) {
    const auto host = tensor.detach().contiguous().cpu();
    sum = base::hash64(static_cast<std::int64_t>(host.scalar_type()), sum);
    for (const auto extent : host.sizes()) sum = base::hash64(extent, sum);
    sum = base::hash64(std::string_view(static_cast<const char*>(host.const_data_ptr()), host.nbytes()), sum);
  }
  return static_cast<std::int64_t>(sum);
}

}  // namespace

void require_same_batch(Team& team, std::span<const at::Tensor> given, std::span<const base::Rank> ranks) {
  std::vector<at::Tensor> dense;
  std::ranges::copy_if(given, std::back_inserter(dense), [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_meta();
  });
  const auto device = dense.empty() ? at::kCPU : dense.front().device();
  const auto own = at::full({1}, checksum(dense), at::TensorOptions(at::kLong).device(device));
  const auto all = team.all_gather(own, {0, {}}).cpu();
  const auto* sums = all.const_data_ptr<std::int64_t>();
  const auto* other = std::find_if(sums, sums + team.size(), [&](std::int64_t sum) { return sum != sums[0]; });
  if (other == sums + team.size()) return;
  throw base::DesyncError(
      base::str("ranks ", ranks.front(), " and ", ranks[static_cast<std::size_t>(other - sums)],
                " of a TP_GROUP have called the model with other values, and with prescaled_batch: true they read one "
                "batch: read data by rdp_rank(), or take prescaled_batch: false"),
      base::Code{"tp-other-batch"});
}

}  // namespace lamina::tensor_parallel
