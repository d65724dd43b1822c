// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <utility>

#include "lamina/base/error.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/frontend/model.h"
#include "lamina/frontend/plain_model.h"
#include "lamina/frontend/routing.h"
#include "lamina/job_checkpoint/record_job.h"
#include "lamina/job_checkpoint/saves.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/session/slicing.h"
#include "lamina/session/step_check.h"
#include "lamina/tensor_parallel/dropout.h"
#include "lamina/tensor_parallel/team.h"

// The part of a model that works in steps.
namespace lamina::frontend {
namespace {

using value::Value;

pipeline::StepResult run(const Current& job, const pipeline::StepSpec& spec) {
  return job.pipelined() ? job.session->job().run_step(spec) : job.session->job().run_step_here(spec);
}

// Has all ranks have what a program wrote to parts of parameters, which stand in optimizers.
void share_written(const Current& job) {
  for (const auto& optimizer : optimizers_of(job)) optimizer->engine->parameters().share_written();
}

void record_step(job_checkpoint::JobRecording& recording, const std::vector<Value>& outputs) {
  std::vector<std::vector<at::Tensor>> results(outputs.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    value::for_each_tensor(outputs[i], [&](const at::Tensor& tensor) { results[i].push_back(tensor); });
  }
  recording.see_results(results);
  recording.end_step();
}

}  // namespace

std::shared_ptr<HeldModel> set_model(std::shared_ptr<Model> model) {
  auto& job = current();
  job.held = std::make_shared<HeldModel>(HeldModel{model});
  job.model = std::move(model);
  return job.held;
}

Model& model_outside_step(const std::string& what) {
  const auto& job = outside_step(what);
  share_written(job);
  if (job.model == nullptr) throw base::UsageError(base::str(what, " without a DistributedModel"));
  return *job.model;
}

pipeline::StepResult run_step(const Batch& batch, const pipeline::Job::Body& body, const base::Call& call) {
  const auto& job = outside_step("a step function");
  share_written(job);
  if (job.saves != nullptr) job.saves->check_before_step();
  job.before_step();
  const auto refuse = [&](base::Microbatch) -> Value { throw base::UsageError(*batch.refused); };
  end_where_all_is_recorded(&job_checkpoint::JobRecording::begin_step);
  pipeline::StepSpec spec{batch.pieces.microbatches(), batch.refused ? refuse : body, [] {}, call};
  spec.samples = batch.pieces.samples();
  auto result = explained([&] { return job.model != nullptr ? job.model->run_step(std::move(spec)) : run(job, spec); });
  const auto count = pipeline::counted(result.samples, result.outputs.size());
  result.outputs.resize(count);
  if (!result.samples.empty()) result.samples.resize(count);
  if (job.recording != nullptr) record_step(*job.recording, result.outputs);
  return result;
}

std::int64_t Model::begin_call() {
  if (!has_current() || current().model.get() != this) return 0;  // the job was shut down: it is called as it is
  if (runtime::in_step()) return 0;
  if (job_.pipelined()) {
    throw faces::refusal("outside-step", "the model was called",
                         "made by lamina::step, in the thread that runs its body; an evaluation is a step without a "
                         "backward: docs/evaluation.md");
  }
  share_written(job_);
  job_.before_step();
  if (c10::GradMode::is_enabled()) watch();
  return reducer_ ? reducer_->note_call(training()) : 0;
}

void Model::end_call(std::int64_t call, const at::Tensor& output) {
  if (call == 0) return;
  if (!output.defined() || !output.requires_grad()) return reducer_->forget_call(call);
  output.register_hook([call, model = weak_from_this()](const at::Tensor&) {
    if (const auto alive = model.lock()) alive->reducer_->await_backward(call);
  });
}

void Model::give_up(const std::exception_ptr& error) {
  if (runtime::in_step() || !has_current() || current().model.get() != this) return;
  if (auto* team = job_.session->known_team()) team->give_up(error);
}

void Model::note_call(const Value& arguments) {
  tensor_parallel::note_taken();  // what a call before this one has left, which failed
  if (!has_current() || current().model.get() != this) return;
  std::vector<at::Tensor> tensors;
  value::for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    if (!tensor.requires_grad()) tensors.push_back(tensor);
  });
  std::string training, trained;
  for (const auto& module : tree_.root()->modules()) training += module->is_training() ? '1' : '0';
  for (const auto& held : tree_.parameters()) trained += held.tensor.requires_grad() ? '1' : '0';
  session::note_call(*job_.session, {tensors, training, trained, std::exchange(is_first_call_, false)});
}

bool Model::wants_first_call() const { return first_call_ != nullptr && router() == first_call_.get(); }

bool Model::first_call(std::optional<Example> example) {
  auto plain = plain_model(example);
  if (!job_.pipelined()) {
    enter(example, std::move(plain));
    return is_checked();
  }
  const auto is_it = std::make_shared<bool>(false);  // of the bodies that wait
  job_.session->job().cut_here([this, is_it, plain = std::move(plain), example = std::move(example)] {
    *is_it = true;
    enter(example, plain);
  });
  return *is_it && is_checked();
}

bool Model::is_traced() const {
  const auto& config = job_.session->config();
  return !partitioned() && config.auto_partition && !config.skip_tracing;
}

// At the first call of a step, or without one: has it made plainly, and the model cut. Collective over the pipeline,
// and over the world where the model is cut.
void Model::enter(const std::optional<Example>& call, std::shared_ptr<TorchPlainModel> plain) {
  if (is_checked()) {
    if (job_.pipelined()) take_plain_values();
    call_plainly(call, std::move(plain));
  }
  if (!partitioned()) cut(is_traced() ? call : std::nullopt);
  if (is_checked() && job_.pipelined()) begin_checked_step();
  set_router(routing_.get());
}

pipeline::StepResult Model::run_step(pipeline::StepSpec spec) {
  const auto parameters = [this] {
    remote::Tensors tensors;
    for (const auto& held : tree_.parameters()) tensors.push_back(held.tensor);
    return tensors;
  };
  const auto run_here = [this](pipeline::StepSpec spec) {
    return job_.pipelined() ? run_pipelined(std::move(spec)) : run_alone(spec);
  };
  const auto run_watched = [&](pipeline::StepSpec spec) {
    return backwards_.run_step(std::move(spec), parameters, run_here);
  };
  look_for_room();
  if (partitioned()) watch();
  const auto other_backwards = backwards_.plain();
  pipeline::StepResult result;
  session::run_step(*job_.session, std::move(spec), [&](pipeline::StepSpec spec) {
    result = reducer_ ? reducer_->run_step(std::move(spec), training(), run_watched) : run_watched(std::move(spec));
  });
  ++steps_;
  if (is_checked()) end_checked_step(other_backwards);
  return result;
}

pipeline::StepResult Model::run_pipelined(pipeline::StepSpec spec) {
  auto& job = job_.session->job();
  std::vector<std::string> names;
  remote::Tensors tensors;
  for (const auto& held : tree_.tensors()) {
    names.push_back(held.name);
    tensors.push_back(held.tensor);
  }
  job.watch_flags(std::move(names), std::move(tensors));
  if (partitioned()) keep_order();  // a BatchNorm's momentum may be another now
  const bool waits = is_traced() || is_checked();
  if (waits && job.leads()) return run_first(std::move(spec));
  try {
    if (waits || !partitioned()) enter(std::nullopt, nullptr);
  } catch (const base::DesyncError&) {
    throw;  // the leading rank is in no step
  } catch (const base::Error&) {
    if (waits) job.run_step(spec);  // the leading rank is in it, and ends it with this
    throw;
  }
  return job.run_step(spec);
}

pipeline::StepResult Model::run_first(pipeline::StepSpec spec) {
  expect_first_call();
  spec.cut = [this] { enter(std::nullopt, nullptr); };
  try {
    return job_.session->job().run_step(spec);
  } catch (...) {
    set_router(partitioned() ? routing_.get() : nullptr);
    throw;
  }
}

void Model::expect_first_call() {
  first_call_ = std::make_unique<FirstCall>([this] { first_call(std::nullopt); });
  set_router(first_call_.get());
}

void Model::backward(const remote::Tensors& tensors, const remote::Tensors& gradients) {
  if (!has_current() || current().model.get() != this) {
    throw faces::refusal("job-ended", "backward", "DistributedModel");
  }
  if (!gradients.empty() && tensors.size() != gradients.size()) {
    throw faces::refusal("gradients-for-tensors", tensors.size(), gradients.size());
  }
  if (is_checked()) job_.check->see_backward(tensors);
  const auto run = [&] { backwards_.run(tensors, gradients); };
  in_team([&] { reducer_ ? reducer_->run_backward(run) : run(); });
}

}  // namespace lamina::frontend
