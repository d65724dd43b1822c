// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/agreement.h"

#include <ATen/ops/empty.h>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"

namespace lamina::data_parallel {
namespace {

// A number that differs, almost surely, where anything of the tensors does.
std::uint64_t layout(std::span<const NamedTensor> tensors, std::uint64_t hash) {
  hash = base::hash64(tensors.size(), hash);
  for (const auto& [name, tensor] : tensors) {
    hash = base::hash64(tensor.scalar_type(), base::hash64(name, hash));
    hash = base::hash64(tensor.dim(), hash);
    for (const auto extent : tensor.sizes()) hash = base::hash64(extent, hash);
  }
  return hash;
}

}  // namespace

std::vector<Gradient> agree(std::span<const NamedTensor> parameters, std::span<const Gradient> mine,
                            std::span<const NamedTensor> buffers, collective::Group& replicas,
                            const collective::CallOptions& options) {
  const auto hash = static_cast<std::int64_t>(layout(buffers, layout(parameters, 0)) >> 1);
  const auto count = static_cast<std::int64_t>(parameters.size());
  // The largest layout, and the negative of the smallest, come out of the same exchange as the words.
  auto exchanged = at::empty({count + 2}, at::kLong);
  auto* numbers = exchanged.mutable_data_ptr<std::int64_t>();
  numbers[0] = hash;
  numbers[1] = -hash;
  for (std::int64_t i = 0; i < count; ++i) numbers[i + 2] = static_cast<std::int64_t>(mine[i]);
  replicas.all_reduce(exchanged, collective::Reduction::kMax, options)->wait();
  if (numbers[0] != hash || numbers[1] != -hash) {
    throw base::UsageError(
        "the replicas of the model differ in the names, shapes or types of their parameters or buffers: change them on "
        "all replicas alike, or make the DistributedModel with broadcast_buffers=False if only buffers differ",
        base::Code{"replica-differs"});
  }
  std::vector<Gradient> all;
  for (std::int64_t i = 0; i < count; ++i) all.push_back(static_cast<Gradient>(numbers[i + 2]));
  return all;
}

}  // namespace lamina::data_parallel
