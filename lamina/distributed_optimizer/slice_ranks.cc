// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/slice_ranks.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "lamina/tensor_parallel/slices.h"
#include "lamina/tensor_parallel/team.h"

namespace lamina::distributed_optimizer {

at::Tensor SliceRanks::part_of(const at::Tensor& whole, const layout::Slicing& slicing) const {
  return tensor_parallel::slice_of(whole.detach(), slicing, rank(), size());
}

at::Tensor SliceRanks::whole_of(const at::Tensor& value, const layout::Slicing& slicing) const {
  const auto team = tensor_parallel::find_team(tensor_parallel::team_name(ranks_.own));
  return tensor_parallel::whole_of(*team, value, slicing);
}

void SliceRanks::take_slice(const at::Tensor& slice, const at::Tensor& whole, const layout::Slicing& slicing,
                            int member) const {
  const auto given = whole.defined() ? value::Value(whole.detach()) : value::Value();
  const auto told = ranks_.mailbox.all_gather(members(), given, ranks_.patience());
  const auto theirs = told.at(static_cast<std::size_t>(member)).as<at::Tensor>();
  slice.detach().copy_(part_of(theirs.to(slice.device()), slicing));
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
