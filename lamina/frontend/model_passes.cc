// SPDX-License-Identifier: Apache-2.0
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/frontend/model.h"
#include "lamina/model/float_types.h"
#include "lamina/value/guarded.h"

// News of a model for its reducer; see [Note: backward pass] in data_parallel/reducer.h.
namespace lamina::frontend {

void Model::make_reducer() {
  auto& session = *job_.session;
  const auto group = [&session](const base::Patience& patience) -> collective::Group& {
    return session.groups().get(topology::kReplicas, patience);
  };
  reducer_ = std::make_shared<data_parallel::Reducer>(
      data_parallel::ReducerOptions{
          options_.backward_passes_per_step, static_cast<std::int64_t>(options_.bucket_cap_mb * (1 << 20)),
          options_.broadcast_buffers, options_.overlapping_allreduce && !session.config().deterministic_server,
          options_.gradient_as_bucket_view ? data_parallel::Gradients::kViews : data_parallel::Gradients::kCopied,
          model::scalar_type(session.config().reduce_dtype)},
      session.mailbox(), session.members(topology::kReplicas), session.patience(), std::make_shared<value::Failures>(),
      data_parallel::Reducer::Parts{[this] { return own_parameters(); },
                                    [this] { return own(tree_.buffers()); },
                                    group,
                                    {},
                                    /*in_one_order=*/!job_.pipelined()});
  session.when_closed([weak = std::weak_ptr(reducer_)] {
    if (const auto closing = weak.lock()) closing->close();
  });
}

void Model::watch() {
  if (!partitioned()) return;
  std::vector<at::Tensor> parameters, slices;
  for (auto& [name, tensor] : own_parameters()) {
    if (value::is_slice(tensor)) slices.push_back(tensor);
    parameters.push_back(std::move(tensor));
  }
  slices_.watch(slices);
  if (reducer_) reducer_->watch(parameters);
  if (job_.session->job().leads()) backwards_.watch(parameters, /*forgets=*/!sharding_ && !job_.pipelined());
}

void Model::register_comm_hook(CommHook hook) {
  if (!job_.session->config().ddp) throw faces::refusal("needs-ddp", "register_comm_hook()");
  if (!hook) throw faces::refusal("not-a-function", "register_comm_hook()", "an empty one");
  if (!reducer_) {  // one replica alone has passes for its hook only
    make_reducer();
    if (partitioned()) watch();
  }
  reducer_->set_hook(std::move(hook));
  backwards_.add_up();  // the hook does all of the averaging
}

void Model::join(const std::function<void()>& loop, const JoinOptions& options) {
  if (!job_.session->config().ddp) throw faces::refusal("needs-ddp", "join()");
  if (!options.enable || !reducer_) return loop();
  reducer_->begin_join(options.divide_by_initial_world_size, options.throw_on_early_termination);
  try {
    loop();
    if (!partitioned()) throw faces::refusal("no-step-in-join");
  } catch (...) {
    reducer_->fail_join(std::current_exception());
    throw;
  }
  reducer_->end_join();
}

void Model::no_sync(const std::function<void()>& loop) {
  if (!reducer_) return loop();
  reducer_->hold_back();
  const auto over = c10::make_scope_exit([&] { reducer_->release(); });
  loop();
}

void Model::complete_gradients(const char* what) {
  if (reducer_) reducer_->complete(what);
}

bool Model::training() const { return tree_.root()->is_training(); }

NamedTensors Model::own_parameters() const {
  auto all = own(tree_.parameters());
  for (const auto& optimizer : optimizers_of(job_)) {
    if (!optimizer->engine->beside().are_updated_here()) continue;
    for (const auto& parameter : optimizer->engine->beside().all()) {
      const bool known = std::ranges::any_of(all, [&](const auto& each) { return each.tensor.is_same(parameter); });
      if (!known) all.push_back({base::str("beside the model, ", all.size()), parameter});
    }
  }
  return all;
}

NamedTensors Model::own(const std::vector<ModuleTensor>& all) const {
  NamedTensors mine;
  for (const auto& held : all) {
    if (table().is_here(held.tensor)) mine.push_back({held.name, held.tensor});
  }
  return mine;
}

}  // namespace lamina::frontend
