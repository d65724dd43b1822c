// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/slice_ranks.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "lamina/tensor_parallel/slices.h"

namespace lamina::distributed_optimizer {

at::Tensor SliceRanks::part_of(const at::Tensor& whole, const layout::Slicing& slicing) const {
  const auto& ranks = ranks_.topology;
  return tensor_parallel::slice_of(whole.detach(), slicing, ranks.index(topology::Group::kTp, ranks_.own),
                                   ranks.size(topology::Group::kTp));
}

at::Tensor SliceRanks::whole_of(const at::Tensor& value, const layout::Slicing& slicing) const {
  std::vector<at::Tensor> slices;
  for (const auto& told : ranks_.mailbox.all_gather(members(), value.detach(), ranks_.patience())) {
    slices.push_back(told.as<at::Tensor>().to(value.device()));
  }
  return tensor_parallel::whole_of(slices, slicing);
}

void SliceRanks::combine(std::span<const SlicedUpdate> updates, std::span<const fused::Combine> how) const {
  if (updates.empty() || how.empty()) return;
  const auto own = at::empty({std::ssize(updates) * std::ssize(how)}, at::kDouble);
  auto* to = own.mutable_data_ptr<double>();
  for (const auto& each : updates) to = std::copy_n(each.update->norms.begin(), how.size(), to);
  const auto everyone = ranks_.mailbox.all_gather(members(), own, ranks_.patience());
  const auto count = static_cast<int>(everyone.size());
  for (int member = 0; member < count; ++member) {
    const auto told = everyone[static_cast<std::size_t>(member)].as<at::Tensor>();
    const auto* from = told.const_data_ptr<double>();
    for (const auto& [update, slices] : updates) {
      const bool has_same_as_before = member * slices % count != 0;  // neighbours may share a slice
      for (std::size_t k = 0; k < how.size(); ++k, ++from) {
        auto& norm = update->norms[k];
        if (!has_same_as_before) norm = member == 0 ? *from : fused::combined(how[k], norm, *from);
      }
    }
  }
}

}  // namespace lamina::distributed_optimizer
