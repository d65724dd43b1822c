// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/module.h>

#include "lamina/collective/process_group.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/model.h"

// News of a model for its reducer; see [Note: backward pass] in data_parallel/reducer.h.
namespace lamina::frontend {

using topology::Group;

void Model::make_reducer() {
  auto& session = *job_.session;
  if (!session.config().ddp || session.topology().size(Group::kDp) == 1) return;
  const auto group = [this](const std::string& purpose, base::Patience patience) {
    auto& session = *job_.session;
    return collective::wrap(*job_.group(Group::kDp), session.job().mailbox(), session.job().presence(),
                            {purpose, session.members(Group::kDp), std::move(patience)});
  };
  reducer_ = std::make_unique<data_parallel::Reducer>(
      data_parallel::ReducerOptions{options_.backward_passes_per_step,
                                    static_cast<std::int64_t>(options_.bucket_cap_mb * (1 << 20)),
                                    options_.broadcast_buffers},
      session.job().mailbox(), session.members(Group::kDp), session.patience(), std::make_shared<value::Failures>(),
      data_parallel::Reducer::Parts{[this] { return own(tree_.parameters()); }, [this] { return own(tree_.buffers()); },
                                    group});
}

void Model::watch() {
  if (!reducer_) return;
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
  if (!reducer_->note_backward(true)) return;
  torch::autograd::Engine::get_default_engine().queue_callback([noticed = std::weak_ptr(noticed_), this] {
    if (noticed.lock() && has_current() && current().model.get() == this) reducer_->end_backward();
  });
}

bool Model::training() const { return tree_.root()->is_training(); }

NamedTensors Model::own(const std::vector<Held>& all) const {
  NamedTensors mine;
  for (const auto& held : all) {
    if (table().whole_here(held.tensor)) mine.push_back({held.name, held.tensor});
  }
  return mine;
}

}  // namespace lamina::frontend
