// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/early_buckets.h"

#include <c10/core/GradMode.h>

#include <algorithm>

namespace lamina::data_parallel {
namespace {

bool dense(const at::Tensor& gradient) { return gradient.layout() == at::kStrided; }

bool alike(const at::Tensor& one, const at::Tensor& other) {
  return one.scalar_type() == other.scalar_type() && one.device() == other.device();
}

// One that a bucket holds as it is, and whose changes are counted.
bool fits(const at::Tensor& gradient, const at::Tensor& bucket) {
  return gradient.defined() && dense(gradient) && alike(gradient, bucket) && !gradient.is_inference();
}

}  // namespace

void EarlyBuckets::arm(Mean mean) {
  const std::lock_guard guard(mutex_);
  mean_ = std::move(mean);
  started_ = 0;
  come_.clear();
  for (auto& bucket : buckets_) bucket.incomplete = 0;
  for (auto& [parameter, planned] : planned_) {
    planned.sent = at::Tensor();
    if (planned.expected > 0) ++buckets_[planned.bucket].incomplete;
  }
}

void EarlyBuckets::note(const at::Tensor& parameter) {
  const std::lock_guard guard(mutex_);
  const int count = ++come_[parameter.unsafeGetTensorImpl()];
  const auto found = planned_.find(parameter.unsafeGetTensorImpl());
  if (!mean_ || found == planned_.end() || count != found->second.expected) return;
  --buckets_[found->second.bucket].incomplete;
  start_complete();
}

void EarlyBuckets::start_complete() {
  while (started_ < buckets_.size() && buckets_[started_].incomplete == 0) start(buckets_[started_++]);
}

void EarlyBuckets::start_rest() {
  const std::lock_guard guard(mutex_);
  while (mean_ && started_ < buckets_.size()) start(buckets_[started_++]);
}

void EarlyBuckets::start(Bucket& bucket) {
  const c10::AutoGradMode no_grad(false);
  if (!alike(bucket.memory, bucket.parameters.front()) || bucket.memory.numel() != elements(bucket.parameters)) {
    bucket.memory = memory_for(bucket.parameters);  // they have got values of other kinds
  }
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : bucket.parameters) {
    auto& planned = planned_.at(parameter.unsafeGetTensorImpl());
    planned.sent = fits(parameter.grad(), bucket.memory) ? parameter.grad() : at::Tensor();
    if (planned.sent.defined()) planned.version = planned.sent._version();
    gradients.push_back(planned.sent);
  }
  bucket.work = begin_mean(gradients, bucket.parameters, bucket.memory, *mean_);
}

Gradient EarlyBuckets::state(const at::Tensor& parameter) const {
  const auto& gradient = parameter.grad();
  const std::lock_guard guard(mutex_);
  const auto found = planned_.find(parameter.unsafeGetTensorImpl());
  if (found == planned_.end() || started_ == 0) {
    return !gradient.defined() ? Gradient::kNone : dense(gradient) ? Gradient::kUnsent : Gradient::kSparse;
  }
  const auto& planned = found->second;
  if (!gradient.defined() && !planned.sent.defined()) return Gradient::kNone;
  if (gradient.defined() && !dense(gradient)) return Gradient::kSparse;
  const bool same = planned.sent.defined() && gradient.is_same(planned.sent) && gradient._version() == planned.version;
  return same ? Gradient::kSent : Gradient::kUnsent;
}

void EarlyBuckets::finish(const std::function<bool(const at::Tensor& parameter)>& wanted) {
  const c10::AutoGradMode no_grad(false);
  {
    const std::lock_guard guard(mutex_);
    mean_.reset();
  }
  for (auto& bucket : buckets_) {
    if (!bucket.work) continue;
    bucket.work->wait();
    bucket.work.reset();
    scatter(bucket.memory, bucket.parameters, how_, wanted);
    if (how_ == Gradients::kViews) bucket.memory = memory_for(bucket.parameters);
  }
}

void EarlyBuckets::plan(std::span<const at::Tensor> parameters) {
  const std::lock_guard guard(mutex_);
  const auto is_planned = [this](const at::Tensor& each) {
    const auto found = planned_.find(each.unsafeGetTensorImpl());
    return found != planned_.end() && alike(each, buckets_[found->second.bucket].memory);
  };
  const bool as_before = parameters.size() == planned_.size() && std::ranges::all_of(parameters, is_planned);
  if (!as_before) {
    drop_plan();
    for (auto& members : arrange(parameters, bucket_bytes_)) {
      for (const auto& parameter : members) planned_[parameter.unsafeGetTensorImpl()].bucket = buckets_.size();
      const auto memory = memory_for(members);
      buckets_.push_back({std::move(members), 0, memory, nullptr});
    }
  }
  for (auto& [parameter, planned] : planned_) {
    const auto found = come_.find(parameter);
    planned.expected = found == come_.end() ? 0 : found->second;
    planned.sent = at::Tensor();
  }
  come_.clear();
  started_ = 0;
}

void EarlyBuckets::complete() {
  const std::lock_guard guard(mutex_);
  const c10::AutoGradMode no_grad(false);
  for (; mean_ && started_ < buckets_.size(); ++started_) {
    auto& bucket = buckets_[started_];
    bucket.memory.zero_();
    bucket.work = begin_mean(bucket.memory, *mean_);
  }
  for (auto& bucket : buckets_) {
    if (const auto work = std::exchange(bucket.work, nullptr)) work->wait();
  }
}

void EarlyBuckets::forget() {
  const std::lock_guard guard(mutex_);
  mean_.reset();
  drop_plan();
  come_.clear();
}

void EarlyBuckets::drop_plan() {
  buckets_.clear();
  planned_.clear();
  started_ = 0;
}

}  // namespace lamina::data_parallel
