// SPDX-License-Identifier: Apache-2.0
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/module.h>

#include "lamina/base/error.h"
#include "lamina/collective/process_group.h"
#include "lamina/data_parallel/buffers.h"
#include "lamina/data_parallel/gradients.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"
#include "lamina/runtime/streams.h"

// What a model does together with its replicas; see [Note: passes].
namespace lamina::frontend {

using topology::Group;

void Model::watch() {
  if (!passes_) return;
  for (auto& [name, parameter] : own(tree_.parameters())) {
    if (!parameter.is_floating_point() && !parameter.is_complex()) continue;
    const bool frozen = !parameter.requires_grad();
    parameter.requires_grad_(true);  // for a hook; one that is frozen now may be trained later
    parameter.register_hook([noticed = std::weak_ptr(noticed_)](const at::Tensor&) {
      if (const auto notice = noticed.lock()) (*notice)();
    });
    if (frozen) parameter.requires_grad_(false);
  }
}

void Model::note_gradient() {
  passed_ = true;
  if (in_step_ || runtime::in_step() || awaiting_.exchange(true)) return;
  torch::autograd::Engine::get_default_engine().queue_callback([noticed = std::weak_ptr(noticed_), this] {
    if (noticed.lock()) end_backward();
  });
}

void Model::end_backward() {
  awaiting_ = false;
  if (has_current() && current().model.get() == this) finish_pass();
}

void Model::fail_backward(const std::exception_ptr& error) {
  passed_ = awaiting_ = false;
  if (passes_) passes_->fail(error);
}

void Model::fail_unseen_backward() {
  if (!awaiting_) return;
  fail_backward(std::make_exception_ptr(
      base::Error("a backward outside of step functions failed, on this replica of the model")));
}

void Model::count_call() {
  if (passes_ && c10::GradMode::is_enabled() && tree_.nodes().front().module->is_training()) passes_->note_call();
}

void Model::finish_pass() {
  passed_ = false;
  if (!passes_) return;
  const auto present = passes_->meet();
  if (++passes_done_ % options_.backward_passes_per_step == 0) passes_->together([&] { reduce(present); });
}

void Model::reduce(const std::vector<int>& present) {
  auto& session = *job_.session;
  const auto& group = job_.group(Group::kDp);
  const auto replicas = [&](const char* purpose) {
    return collective::wrap(*group, session.job().mailbox(), session.job().presence(),
                            {purpose, session.members(Group::kDp), passes_->patience()});
  };
  const auto bucket_bytes = static_cast<std::int64_t>(options_.bucket_cap_mb * (1 << 20));
  const auto all = replicas("averaging gradients");
  data_parallel::reduce_gradients(own(tree_.parameters()), *all, bucket_bytes,
                                  data_parallel::mean_over(*all, static_cast<int>(present.size())));
  if (options_.broadcast_buffers) {
    data_parallel::broadcast_buffers(own(tree_.buffers()), *replicas("broadcasting buffers"), present.front());
  }
}

NamedTensors Model::own(const std::vector<Held>& all) const {
  NamedTensors mine;
  for (const auto& held : all) {
    if (table().whole_here(held.tensor)) mine.push_back({held.name, held.tensor});
  }
  return mine;
}

}  // namespace lamina::frontend
