// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/running_statistics.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/upload.h"
#include "lamina/runtime/statistics_weights.h"

namespace lamina::runtime {
namespace {

// The buffers are ordinary tensors, whatever mode the step is entered in.
struct Plainly {
  const c10::InferenceMode no_inference{false};
  const at::NoGradGuard no_grad;
};

// Tells whether nothing has changed, where that takes no wait for a device; there all is taken as changed.
bool is_known_same(const at::Tensor& now, const at::Tensor& before) {
  return devices::is_host(now) && at::equal(now, before);
}

}  // namespace

void RunningStatistics::Pool::install() {
  std::vector<at::Tensor> flat;
  std::vector<std::int64_t> numbers(modules.begin(), modules.end()), sizes;
  std::int64_t size = 0;
  for (const auto& buffer : buffers) {
    flat.push_back(buffer.reshape({-1}));
    sizes.push_back(buffer.numel());
    offsets.push_back(size);
    size += buffer.numel();
  }
  before = at::cat(flat);
  current = before.clone();
  elements = devices::upload(at::repeat_interleave(at::tensor(numbers), at::tensor(sizes)), before.device());
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    aside.push_back(buffers[i].variable_data());
    buffers[i].unsafeGetTensorImpl()->shallow_copy_from(part(current, i).getIntrusivePtr());
  }
}

void RunningStatistics::Pool::put_back() {
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    buffers[i].unsafeGetTensorImpl()->shallow_copy_from(aside[i].getIntrusivePtr());
  }
}

at::Tensor RunningStatistics::Pool::part(const at::Tensor& flat, std::size_t buffer) const {
  return flat.narrow(0, offsets[buffer], buffers[buffer].numel()).view(buffers[buffer].sizes());
}

at::Tensor RunningStatistics::Pool::spread(const at::Tensor& of_modules) const {
  return of_modules.to(before.device()).index_select(0, elements);
}

// Into `current` too, for whoever has taken a view of a buffer in the step.
void RunningStatistics::Pool::write(const at::Tensor& flat) {
  current.copy_(flat);
  for (std::size_t i = 0; i < buffers.size(); ++i) aside[i].copy_(part(flat, i));
}

void RunningStatistics::begin(std::vector<BatchNorm> modules) {
  if (modules.empty()) return;
  const Plainly plainly;
  modules_ = std::move(modules);
  calls_.assign(modules_.size(), {});
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    const auto& [name, mean, var, count, momentum] = modules_[i];
    if (!by_mean_.emplace(mean.unsafeGetTensorImpl(), i).second) continue;  // two modules share their buffers
    add(mean, i, /*is_count=*/false);
    add(var, i, /*is_count=*/false);
    add(count, i, /*is_count=*/true);
  }
  for (auto& pool : pools_) pool.install();
}

void RunningStatistics::add(const at::Tensor& buffer, std::size_t module, bool is_count) {
  const auto fits = [&](const Pool& pool) {
    const auto& other = pool.buffers.front();
    return pool.counts == is_count && other.scalar_type() == buffer.scalar_type() && other.device() == buffer.device();
  };
  auto pool = std::ranges::find_if(pools_, fits);
  if (pool == pools_.end()) pool = pools_.insert(pool, Pool{.counts = is_count});
  pool->buffers.push_back(buffer);
  pool->modules.push_back(module);
}

void RunningStatistics::exchange(const Memory& own) const {
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    auto& memory = *pools_[i].current.storage().unsafeGetStorageImpl();
    auto& other = *own[i].storage().unsafeGetStorageImpl();
    auto theirs = other.set_data_ptr({});
    theirs = memory.set_data_ptr(std::move(theirs));
    other.set_data_ptr(std::move(theirs));
  }
}

void RunningStatistics::turn_of(base::Microbatch microbatch) {
  if (modules_.empty() || current_ == microbatch) return;
  if (current_) exchange(own_.at(*current_));
  auto& own = own_[microbatch];
  if (own.empty()) {
    const Plainly plainly;
    for (const auto& pool : pools_) own.push_back(pool.before.clone());
  }
  exchange(own);
  current_ = microbatch;
}

void RunningStatistics::note_call(const at::Tensor& running_mean, bool trains) {
  const auto found = by_mean_.find(running_mean.unsafeGetTensorImpl());
  if (found == by_mean_.end() || !current_) return;
  auto& [first_to_train, last_to_read] = calls_[found->second];
  if (trains) {
    first_to_train = std::min(first_to_train.value_or(*current_), *current_);
  } else {
    last_to_read = std::max(last_to_read.value_or(*current_), *current_);
  }
  if (!first_to_train || !last_to_read || *last_to_read <= *first_to_train) return;
  throw base::UsageError(
      base::str(modules_[found->second].name,
                " runs in training and in evaluation mode in one step: microbatches overlap, so that an evaluation "
                "would not see the running statistics of those before it. Evaluate in a step function of its own, or "
                "set active_microbatches to 1 and schedule to \"interleaved\""),
      base::Code{"step-mixed-modes"});
}

void RunningStatistics::end(bool keep) {
  if (modules_.empty()) return;
  const Plainly plainly;
  if (current_) exchange(own_.at(*current_));
  current_.reset();
  if (keep) fold();
  for (auto& pool : pools_) pool.put_back();
  pools_.clear();
  own_.clear();
  by_mean_.clear();
  modules_.clear();
}

// In double precision, which costs little beside activations.
void RunningStatistics::fold() {
  Memory before, sums(pools_.size());
  std::vector<std::optional<double>> momenta;
  for (const auto& pool : pools_) before.push_back(pool.before);
  for (const auto& module : modules_) momenta.push_back(module.momentum);
  const auto found = counts(before);
  StatisticsWeights weights(momenta, found);
  for (const auto& [microbatch, own] : own_) {
    const auto [of_own, of_sum, of_before] = weights.next(counts(own), [&] { return changed(own); });
    for (std::size_t i = 0; i < pools_.size(); ++i) {
      const auto& pool = pools_[i];
      if (pool.counts || is_known_same(own[i], pool.before)) continue;
      const auto as_found = pool.before.to(at::kDouble);
      const auto so_far = sums[i].defined() ? sums[i] : as_found;
      const auto added = own[i].to(at::kDouble).mul(pool.spread(of_own)).sub(as_found.mul(pool.spread(of_before)));
      sums[i] = so_far.mul(pool.spread(of_sum)).add(added);
    }
  }
  const bool counted = !is_known_same(weights.counts(), found);
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    auto& pool = pools_[i];
    if (pool.counts && counted) sums[i] = pool.spread(weights.counts());
    if (sums[i].defined()) pool.write(sums[i].to(pool.before.scalar_type()));
  }
}

// The counts of all modules, as doubles on one device.
at::Tensor RunningStatistics::counts(const Memory& memory) const {
  at::Tensor counts;
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const auto& pool = pools_[i];
    if (!pool.counts) continue;
    if (!counts.defined()) counts = at::zeros({std::ssize(modules_)}, memory[i].options().dtype(at::kDouble));
    counts.index_copy_(0, pool.elements.to(counts.device()), memory[i].to(counts.device(), at::kDouble));
  }
  return counts;
}

at::Tensor RunningStatistics::changed(const Memory& own) const {
  at::Tensor changes;
  for (std::size_t i = 0; i < pools_.size(); ++i) {
    const auto& pool = pools_[i];
    if (pool.counts) continue;
    const auto differ = own[i].ne(pool.before).to(at::kDouble);
    const auto of_modules = at::zeros({std::ssize(modules_)}, differ.options()).index_add(0, pool.elements, differ);
    changes = changes.defined() ? changes.add(of_modules.to(changes.device())) : of_modules;
  }
  return changes.gt(0);
}

}  // namespace lamina::runtime
