// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/owners.h"

#include <algorithm>

#include "lamina/base/error.h"

namespace lamina::distributed_optimizer {
namespace {

// The member that has the least, which has so much more now.
int least(std::vector<std::int64_t>& load, std::int64_t more) {
  const auto found = std::ranges::min_element(load);
  *found += more;
  return static_cast<int>(found - load.begin());
}

}  // namespace

void Owners::spread(std::span<const at::Tensor> locals, const HeldIn& held_in) {
  std::vector<std::pair<at::Tensor, Held>> parts;
  for (const auto& local : locals) {
    if (owner_of_part_.contains(local.unsafeGetTensorImpl())) continue;
    if (auto held = held_in(local); held.is_part()) parts.emplace_back(local, std::move(held));
  }
  const auto bytes = [](const auto& each) { return each.second.elements * each.first.element_size(); };
  std::ranges::stable_sort(parts, std::ranges::greater(), bytes);
  for (const auto& each : parts) {
    const auto& [local, held] = each;
    auto& owner = owner_of_part_[local.unsafeGetTensorImpl()];
    if (held.part) owner.of_parts = least(load_, bytes(each));
    if (held.slicing != nullptr) owner.of_slices = least(load_of_slices_, bytes(each));
  }
}

bool Owners::owns(const at::Tensor& local) const {
  const auto found = owner_of_part_.find(local.unsafeGetTensorImpl());
  if (found == owner_of_part_.end()) return false;
  return owns_parts(found->second) && found->second.of_slices == slice_ranks_.rank();
}

std::vector<at::Tensor> Owners::begin(std::span<const at::Tensor> locals, const HeldIn& held_in) {
  forget();
  std::vector<at::Tensor> in_step(locals.begin(), locals.end());
  std::vector<std::size_t> parts;
  std::vector<std::uint8_t> present;
  for (std::size_t i = 0; i < locals.size(); ++i) {
    if (!owner_of_part_.contains(locals[i].unsafeGetTensorImpl())) continue;
    parts.push_back(i);
    present.push_back(locals[i].grad().defined() ? 1 : 0);
    in_step[i].reset();
  }
  if (parts.empty()) return in_step;
  if (shard_ranks_ != nullptr) present = shard_ranks_->any(std::move(present));
  std::vector<at::Tensor> values, gradients;
  std::vector<std::size_t> of_updated;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (present[i] == 0) continue;
    const auto& local = locals[parts[i]];
    const auto held = held_in(local);
    const auto owner = owner_of_part_.at(local.unsafeGetTensorImpl());
    of_updated.push_back(parts[i]);
    updated_.push_back({local, local.grad(), {}, held.slicing, owner});
    if (!held.part) continue;
    parts_.push_back({*held.part, *owner.of_parts});
    divided_.push_back(updated_.size() - 1);
    values.push_back(local);
    gradients.push_back(local.grad());
  }
  join_parts(values, gradients);
  join_slices();
  for (std::size_t i = 0; i < updated_.size(); ++i) in_step[of_updated[i]] = updated_[i].whole;
  return in_step;
}

void Owners::join_parts(std::span<const at::Tensor> values, std::span<const at::Tensor> gradients) {
  if (parts_.empty()) return;
  const auto whole_gradients = shard_ranks_->to_owners(parts_, gradients);
  const auto wholes = shard_ranks_->to_owners(parts_, values);
  for (std::size_t i = 0; i < divided_.size(); ++i) {
    updated_[divided_[i]].slice = wholes[i];
    updated_[divided_[i]].gradient = whole_gradients[i];
  }
}

void Owners::join_slices() {
  for (auto& each : updated_) {
    if (!each.slice.defined()) continue;
    each.whole = each.slice;
    if (each.slicing != nullptr) {
      each.whole = slice_ranks_.whole_of(each.slice, *each.slicing);
      each.gradient = slice_ranks_.whole_of(each.gradient, *each.slicing);
      if (each.owner.of_slices != slice_ranks_.rank()) each.whole.reset();
    }
    if (each.whole.defined()) each.whole.requires_grad_().mutable_grad() = each.gradient;
  }
}

void Owners::end() {
  std::vector<at::Tensor> slices;
  for (const auto& each : updated_) {
    if (!each.slice.defined() || each.slicing == nullptr) continue;
    slice_ranks_.take_slice(each.slice, each.whole, *each.slicing, each.owner.of_slices);
  }
  for (const auto place : divided_) slices.push_back(updated_[place].slice);
  if (!parts_.empty()) shard_ranks_->from_owners(parts_, slices);
  forget();
}

void Owners::forget() {
  updated_.clear();
  parts_.clear();
  divided_.clear();
}

}  // namespace lamina::distributed_optimizer
