// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/stand_ins.h"

#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include "lamina/base/error.h"

namespace lamina::distributed_optimizer {
namespace {

at::Tensor flat_part(const at::Tensor& whole, std::int64_t begin, std::int64_t end) {
  if (begin == 0 && end == whole.numel()) return whole.detach();
  return whole.detach().reshape({-1}).narrow(0, begin, end - begin);
}

}  // namespace

at::Tensor StandIns::take(const at::Tensor& of, std::int64_t begin, std::int64_t end, bool in_float32) {
  const at::NoGradGuard no_grad;
  const auto part = flat_part(of, begin, end);
  base::internal_check(in_float32 || part.is_alias_of(of), "a stand-in without a copy has the tensor's memory");
  auto own = in_float32 ? part.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous() : part;
  own.requires_grad_(of.requires_grad());
  by_stand_in_[own.unsafeGetTensorImpl()] = all_.size();
  all_.push_back({of, own, begin, end, in_float32});
  return own;
}

std::optional<std::size_t> StandIns::find(const at::Tensor& stand_in) const {
  const auto found = by_stand_in_.find(stand_in.unsafeGetTensorImpl());
  return found == by_stand_in_.end() ? std::nullopt : std::optional(found->second);
}

at::Tensor StandIns::part_of(std::size_t number, const at::Tensor& whole) const {
  const auto& one = all_.at(number);
  return flat_part(whole, one.begin, one.end);
}

at::Tensor StandIns::half_copy(std::size_t number) const {
  const auto& one = all_.at(number);
  return one.copied ? flat_part(one.of, one.begin, one.end) : at::Tensor();
}

void StandIns::give_gradients(double factor, bool as_is) {
  const at::NoGradGuard no_grad;
  for (auto& one : all_) {
    // Its tensor may have been given other memory, as by `parameter.data = ...`.
    if (!one.copied && !one.own.is_alias_of(one.of)) one.own.set_data(flat_part(one.of, one.begin, one.end));
    const auto& whole = one.of.grad();
    auto& own = one.own.mutable_grad();
    if (!whole.defined()) {
      own.reset();
      continue;
    }
    auto part = flat_part(whole.is_sparse() ? whole.to_dense() : whole, one.begin, one.end);
    if (as_is) {
      own = std::move(part);
    } else if (one.copied) {
      own = part.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).mul_(factor);
    } else {
      own = factor == 1 ? std::move(part) : part.mul(factor);
    }
  }
}

void StandIns::forget_gradients() {
  for (auto& one : all_) one.own.mutable_grad().reset();
}

void StandIns::write_back() {
  const at::NoGradGuard no_grad;
  for (auto& one : all_) {
    if (one.copied) flat_part(one.of, one.begin, one.end).copy_(one.own);
  }
}

void StandIns::follow() {
  const at::NoGradGuard no_grad;
  for (auto& one : all_) {
    if (!one.copied) continue;
    const auto part = flat_part(one.of, one.begin, one.end);
    one.own.copy_(at::where(one.own.to(part.scalar_type()).eq(part), one.own, part.to(at::kFloat)));
  }
}

}  // namespace lamina::distributed_optimizer
