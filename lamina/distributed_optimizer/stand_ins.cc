// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/stand_ins.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/where.h>
#include <c10/core/GradMode.h>

#include <unordered_set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/fused/follow.h"
#include "lamina/optim/step.h"
#include "lamina/optim/update_tensors.h"
#include "lamina/value/dtype.h"
#include "lamina/value/guarded.h"

namespace lamina::distributed_optimizer {
namespace {

// Elements of a tensor, flattened: a view where they lie in that order, else a copy.
at::Tensor flat_part(const at::Tensor& whole, const std::optional<layout::Share>& share) {
  const value::Unguarded own_work;
  if (!share || share->count() == whole.numel()) return whole.detach();
  return whole.detach().reshape({-1}).narrow(0, share->begin, share->count());
}

bool overlaps_itself(const at::Tensor& tensor) { return at::has_internal_overlap(tensor) == at::MemOverlap::Yes; }

// Leaves one alone that no update can have changed.
void write_part(const at::Tensor& whole, const std::optional<layout::Share>& share, const at::Tensor& value) {
  if (overlaps_itself(whole)) return;
  const value::Unguarded own_work;
  const auto part = flat_part(whole, share);
  part.copy_(value);
  if (part.is_alias_of(whole) || part.numel() == 0) return;
  auto all = whole.detach().reshape({-1});
  all.narrow(0, share->begin, share->count()).copy_(part);
  whole.detach().copy_(all.view(whole.sizes()));
}

std::int64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

bool lies_as(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.dtype() == b.dtype() &&
         a.sizes() == b.sizes() && a.strides() == b.strides();
}

// Gives a master the values of half elements, but where it has those already, in its precision.
void take_over(const at::Tensor& master, const at::Tensor& half) {
  const auto own = master.detach().view({-1}), values = half.reshape({-1});
  own.copy_(at::where(own.to(values.scalar_type()).eq(values), own, values.to(own.scalar_type())));
}

// Notes the same of memory of the processor, to be done at once; false for other tensors.
bool note_copied(const at::Tensor& master, const at::Tensor& half, std::vector<fused::Copied>& all) {
  const bool are_plain =
      half.is_contiguous() && master.is_contiguous() && devices::is_host(half) && devices::is_host(master);
  if (!value::is_half(half.scalar_type()) || !are_plain) return false;
  all.push_back({master.mutable_data_ptr<float>(), optim::reals_of(half), half.const_data_ptr(),
                 static_cast<std::size_t>(half.numel())});
  return true;
}

}  // namespace

at::Tensor StandIns::take(const at::Tensor& of, const std::optional<layout::Share>& share, bool in_float32) {
  const at::NoGradGuard no_grad;
  const auto part = flat_part(of, share);
  // In the same memory, with a count of writes of its own.
  auto own =
      in_float32 ? part.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous() : part.variable_data();
  own.requires_grad_(of.requires_grad());
  by_stand_in_[own.unsafeGetTensorImpl()] = all_.size();
  all_.push_back({of, own, share, in_float32, version_of(of), version_of(own)});
  return own;
}

std::optional<std::size_t> StandIns::find(const at::Tensor& stand_in) const {
  const auto found = by_stand_in_.find(stand_in.unsafeGetTensorImpl());
  return found == by_stand_in_.end() ? std::nullopt : std::optional(found->second);
}

at::Tensor StandIns::half_copy(std::size_t number) const {
  const auto& one = all_.at(number);
  if (!one.master) return {};
  auto part = flat_part(one.of, one.share);
  const bool is_half = part.scalar_type() != one.own.scalar_type();  // a program may have converted it since
  return is_half && part.is_alias_of(one.of) ? part : at::Tensor();
}

at::Tensor StandIns::gradient(std::size_t number) {
  const at::NoGradGuard no_grad;
  auto& one = all_.at(number);
  const auto& whole = one.of.grad();
  if (!whole.defined()) return {};
  const bool lies_there = !one.master && !whole.is_sparse();
  const auto part = flat_part(whole.is_sparse() ? whole.to_dense() : whole, one.share);
  if (lies_there && part.is_alias_of(whole)) return part;
  const bool known = one.read.defined() && one.read_of._unsafe_get_target() == whole.unsafeGetTensorImpl();
  if (known && one.whole_version == version_of(whole)) return one.read;
  take_gradients();
  one.read = part.to(one.own.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  one.read_version = version_of(one.read);
  one.whole_version = version_of(whole);
  one.read_of = Weak(whole.getIntrusivePtr());
  return one.read;
}

void StandIns::set_gradient(std::size_t number, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  auto& one = all_.at(number);
  auto& whole = one.of.mutable_grad();
  one.read.reset();
  if (!gradient.defined()) return whole.reset();
  if (!whole.defined() || gradient.sizes() != one.own.sizes()) {
    const auto [begin, end, size] = one.share.value_or(layout::share_of(one.of.numel(), 1, 0));
    throw base::UsageError(
        base::str("a gradient of shape ", gradient.sizes(), " was set of what stands in the optimizer for ",
                  whole.defined() ? "" : "a parameter that has no gradient, ", "elements ", begin, " to ", end,
                  " of a parameter of shape ", one.of.sizes(), ": set the parameter's own gradient, parameter.grad"));
  }
  if (whole.is_sparse()) whole = whole.to_dense();
  write_part(whole, one.share, gradient);
}

void StandIns::take_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& one : all_) {
    const auto read = std::exchange(one.read, {});
    auto& whole = one.of.mutable_grad();
    if (!read.defined() || version_of(read) == one.read_version || !whole.defined()) continue;
    if (one.read_of._unsafe_get_target() != whole.unsafeGetTensorImpl()) continue;  // forgotten since
    if (version_of(whole) != one.whole_version) {
      throw base::UsageError(
          "the gradient of what stands in the optimizer for a parameter was changed, and then the parameter's: change "
          "it after the last backward before the step, or parameter.grad in its place");
    }
    if (whole.is_sparse()) whole = whole.to_dense();
    write_part(whole, one.share, read);
  }
}

void StandIns::give_gradients(double factor, bool as_is) {
  const at::NoGradGuard no_grad;
  for (const auto& one : all_) {
    if (!one.of.grad().defined() || !overlaps_itself(one.of)) continue;
    throw base::UsageError(base::str("unsupported operation: more than one element of a parameter of shape ",
                                     one.of.sizes(), " refers to a single memory location; clone() it before"));
  }
  take_gradients();
  follow();
  for (auto& one : all_) {
    const auto& whole = one.of.grad();
    auto& own = one.own.mutable_grad();
    if (!whole.defined()) {
      own.reset();
      continue;
    }
    auto part = flat_part(whole.is_sparse() ? whole.to_dense() : whole, one.share);
    if (as_is) {
      own = std::move(part);
    } else if (one.master) {
      own = part.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).mul_(factor);
    } else {
      own = factor == 1 ? std::move(part) : part.mul(factor);
    }
  }
}

void StandIns::forget_gradients() {
  for (auto& one : all_) one.own.mutable_grad().reset();
}

void StandIns::write_back(bool as_is) {
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const auto& one = all_[i];
    const bool given = one.master ? as_is && half_copy(i).defined() : one.own.is_alias_of(one.of);
    if (!given) write_part(one.of, one.share, one.own);
  }
}

void StandIns::settle() {
  for (std::size_t i = 0; i < all_.size(); ++i) settle(i);
}

void StandIns::settle(std::size_t number) {
  auto& one = all_.at(number);
  one.of_version = version_of(one.of);
  one.own_version = version_of(one.own);
}

std::vector<std::size_t> StandIns::written() const {
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < all_.size(); ++i) {
    const auto& one = all_[i];
    if (!one.master && one.share && version_of(one.own) != one.own_version) numbers.push_back(i);
  }
  return numbers;
}

void StandIns::follow() {
  const at::NoGradGuard no_grad;
  std::unordered_set<const c10::StorageImpl*> written;  // memory of masters, which may lie together
  for (const auto& one : all_) {
    if (!one.master || version_of(one.own) == one.own_version || version_of(one.of) != one.of_version) continue;
    written.insert(one.own.storage().unsafeGetStorageImpl());
  }
  std::vector<fused::Copied> copied;
  for (auto& one : all_) {
    const auto part = flat_part(one.of, one.share);
    if (!one.master) {
      if (!lies_as(one.own, part)) one.own.set_data(part);
      continue;
    }
    const bool changed = version_of(one.of) != one.of_version;
    if (!changed && written.contains(one.own.storage().unsafeGetStorageImpl())) continue;
    if (!part.is_alias_of(one.of) || !note_copied(one.own, part, copied)) take_over(one.own, part);
    one.of_version = version_of(one.of);
    one.own_version = version_of(one.own);
  }
  if (!copied.empty()) fused::follow(copied, {*optim::shared_threads()});
}

}  // namespace lamina::distributed_optimizer
