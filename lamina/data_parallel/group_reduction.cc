// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/group_reduction.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "lamina/data_parallel/agreement.h"
#include "lamina/data_parallel/buffers.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"

namespace lamina::data_parallel {

void GroupReduction::arm(const base::Patience& patience) {
  if (!grouped_ || (!apart_ && !may_complete())) return;
  auto& all = apart_ ? *apart_ : over_.group(patience);
  early_.arm({&all, all.size(), {"averaging gradients", patience}, travels_});
}

// Members whose pass has failed can start the rest all the same: see EarlyBuckets::complete().
bool GroupReduction::may_complete() const { return in_one_order_ && !devices::is_host(devices::rank_device()); }

// One apart, where a member may leave what it has started. Such a group carries tensors of the host alone.
collective::Group& GroupReduction::group(const std::vector<NamedTensor>& parameters,
                                         const std::vector<NamedTensor>& buffers, const base::Patience& patience) {
  auto& shared = over_.group(patience);
  if (!std::exchange(grouped_, true)) {
    const auto on_host = [](const NamedTensor& each) { return devices::is_host(each.tensor); };
    if (std::ranges::all_of(parameters, on_host) && std::ranges::all_of(buffers, on_host)) {
      apart_ = shared.apart("reduction");
    }
  }
  return apart_ ? *apart_ : shared;
}

void GroupReduction::reduce(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                            const Options& options) {
  const bool hooked = options.hook != nullptr;
  const collective::CallOptions said{hooked ? "reducing gradients" : "averaging gradients", options.patience};
  auto& all = group(parameters, buffers, options.patience);
  early_.start_rest();
  std::vector<Gradient> mine;
  for (const auto& parameter : parameters) mine.push_back(early_.state(parameter.tensor));
  const auto agreed = agree(parameters, mine, buffers, all, said);

  std::unordered_set<const at::TensorImpl*> sent;
  std::vector<bool> unsent;
  std::vector<at::Tensor> next;  // gradients come to the last parameters first
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (agreed[i] == Gradient::kSent) sent.insert(parameters[i].tensor.unsafeGetTensorImpl());
    unsent.push_back(agreed[i] >= Gradient::kUnsent);
    if (agreed[i] == Gradient::kSent || agreed[i] == Gradient::kUnsent) next.push_back(parameters[i].tensor);
  }
  std::ranges::reverse(next);
  early_.finish([&](const at::Tensor& parameter) { return sent.contains(parameter.unsafeGetTensorImpl()); });
  const auto mean = mean_over({&all, options.divisor.value_or(all.size()), said, travels_});
  buckets_.reduce(parameters, unsent, hooked ? *options.hook : mean);  // no copy: a hook may be Python's
  broadcast(buffers, all, options.root, {"broadcasting buffers", options.patience});
  if (options.plans && (apart_ || may_complete())) early_.plan(next);
}

void GroupReduction::take_over(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                               int root, const base::Patience& patience) {
  const collective::CallOptions options{"broadcasting buffers", patience};
  auto& all = group(parameters, buffers, patience);
  agree(parameters, std::vector<Gradient>(parameters.size()), buffers, all, options);
  broadcast(parameters, all, root, options);
  broadcast(buffers, all, root, options);
}

void GroupReduction::note_begun() {
  if (apart_) begun_ = apart_->begun();
}

void GroupReduction::catch_up(std::int64_t number) {
  if (apart_ && begun_ < number) apart_->resume_at(number);
  begun_ = number;
}

void GroupReduction::abandon() {
  if (apart_) begun_ = apart_->abandon();
  if (!apart_) early_.complete();
  early_.forget();
}

void GroupReduction::close() {
  early_.forget();
  apart_.reset();
}

}  // namespace lamina::data_parallel
