// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/owners.h"

#include <algorithm>

#include "lamina/base/error.h"

namespace lamina::distributed_optimizer {

void Owners::spread(std::span<const at::Tensor> locals, const PartOf& part_of) {
  std::vector<LocalShard> parts;
  for (const auto& local : locals) {
    if (owner_of_part_.contains(local.unsafeGetTensorImpl())) continue;
    if (auto part = part_of(local)) parts.push_back(std::move(*part));
  }
  const auto bytes = [](const LocalShard& part) { return part.parameter.numel() * part.own.element_size(); };
  std::ranges::stable_sort(parts, std::ranges::greater(), bytes);
  for (const auto& part : parts) {
    const auto owner = std::ranges::min_element(load_);
    *owner += bytes(part);
    owner_of_part_[part.own.unsafeGetTensorImpl()] = static_cast<int>(owner - load_.begin());
  }
}

bool Owners::owns(const at::Tensor& local) const {
  const auto found = owner_of_part_.find(local.unsafeGetTensorImpl());
  return found != owner_of_part_.end() && found->second == shard_ranks_.rank();
}

std::vector<at::Tensor> Owners::begin(std::span<const at::Tensor> locals, const PartOf& part_of) {
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
  present = shard_ranks_.any(std::move(present));
  std::vector<at::Tensor> values, gradients;
  std::vector<std::size_t> of_updated;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (present[i] == 0) continue;
    const auto& local = locals[parts[i]];
    const auto part = part_of(local);
    base::internal_check(part.has_value(), "what has an owner is a part");
    updated_.push_back({*part, owner_of_part_.at(local.unsafeGetTensorImpl())});
    values.push_back(local);
    gradients.push_back(local.grad());
    of_updated.push_back(parts[i]);
  }
  const auto whole_gradients = shard_ranks_.to_owners(updated_, gradients);
  wholes_ = shard_ranks_.to_owners(updated_, values);
  for (std::size_t i = 0; i < wholes_.size(); ++i) {
    if (!wholes_[i].defined()) continue;
    wholes_[i].requires_grad_().mutable_grad() = whole_gradients[i];
    in_step[of_updated[i]] = wholes_[i];
  }
  return in_step;
}

void Owners::end() {
  if (!updated_.empty()) shard_ranks_.from_owners(updated_, wholes_);
  forget();
}

void Owners::forget() {
  updated_.clear();
  wholes_.clear();
}

}  // namespace lamina::distributed_optimizer
