// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/process_group.h"
#include "lamina/data_parallel/buffers.h"
#include "lamina/data_parallel/gradients.h"
#include "lamina/face/current.h"
#include "lamina/face/model.h"
#include "lamina/face/routing.h"
#include "lamina/pipeline/streams.h"

// What a model does in steps.
namespace lamina::face {
namespace {

using topology::Group;
using value::Value;

std::vector<Value> run_here(pipeline::Session& session, const pipeline::Job::Body& body) {
  std::vector<Value> outputs;
  session.job().run_step_here(session.config().microbatches,
                              [&](base::Microbatch microbatch) { outputs.push_back(body(microbatch)); });
  return outputs;
}

}  // namespace

void set_model(std::shared_ptr<Model> model) { current().model = std::move(model); }

Model& model_outside_step(const std::string& what) {
  const auto& job = outside_step(what);
  if (job.model == nullptr) throw base::UsageError(base::str(what, " without a DistributedModel"));
  return *job.model;
}

std::vector<Value> run_step(const pipeline::Job::Body& body, const base::Call& call) {
  auto& job = outside_step("a step function");
  if (job.model != nullptr) return job.model->run_step(body, call);
  if (!job.pipelined()) return run_here(*job.session, body);
  return job.session->job().run_step(job.session->config().microbatches, body, [] {}, call);
}

bool Model::wants_first_call() const { return first_call_ != nullptr && router() == first_call_.get(); }
void Model::first_call(Example example) { first_call_->ask(std::move(example)); }

std::vector<Value> Model::run_step(const pipeline::Job::Body& body, const base::Call& call) {
  passed_ = false;
  // The ranks that follow hear from the leading one whether there was a backward.
  const auto noted = [this, &body](base::Microbatch microbatch) -> Value {
    auto output = body(microbatch);
    return value::Tuple{{std::move(output), passed_.load()}};
  };
  auto outputs = job_.pipelined() ? run_pipelined(noted, call) : run_here(*job_.session, noted);
  bool passed = false;
  for (auto& output : outputs) {
    auto& parts = output.as<value::Tuple>().items;
    passed = passed || parts.at(1).as<bool>();
    output = Value(std::move(parts.at(0)));
  }
  if (passed) finish_pass();
  return outputs;
}

std::vector<Value> Model::run_pipelined(const pipeline::Job::Body& body, const base::Call& call) {
  auto& job = job_.session->job();
  const auto& config = job_.session->config();
  if (partitioned()) return job.run_step(config.microbatches, body, [] {}, call);
  const bool traced = config.auto_partition && !config.skip_tracing;
  if (traced && job.leads()) return run_first(body, call);
  try {
    cut(std::nullopt);
  } catch (const base::DesyncError&) {
    throw;  // the leading rank is in no step
  } catch (const base::Error&) {
    if (traced) job.run_step(config.microbatches, body, [] {});  // the leading rank is in it, and ends it with this
    throw;
  }
  return job.run_step(config.microbatches, body, [] {}, call);
}

std::vector<Value> Model::run_first(const pipeline::Job::Body& body, const base::Call& call) {
  first_call_ = std::make_shared<FirstCall>([this](const auto& example) { cut(example); });
  set_router(first_call_.get());
  try {
    return job_.session->job().run_step(
        job_.session->config().microbatches, first_call_->around(body), [this] { first_call_->serve(); }, call);
  } catch (...) {
    if (!partitioned()) set_router(nullptr);
    throw;
  }
}

void Model::backward(const pipeline::Tensors& tensors, const pipeline::Tensors& gradients) {
  if (!has_current() || current().model.get() != this) {
    throw base::UsageError("backward of a DistributedModel whose job was shut down");
  }
  if (tensors.size() < gradients.size()) {
    throw base::UsageError(base::str("backward: ", tensors.size(), " tensors, but ", gradients.size(), " gradients"));
  }
  const bool inside = pipeline::in_step();
  passed_ = true;
  const int count = job_.session->config().microbatches;
  const double scale = inside && options_.average_grads_across_microbatches ? 1.0 / count : 1.0;
  if (job_.pipelined()) return job_.session->job().backward(tensors, gradients, scale);
  pipeline::run_backward(tensors, gradients, scale);
  if (!inside) finish_pass();
}

void Model::finish_pass() {
  auto& session = *job_.session;
  if (!session.config().ddp || session.topology().size(Group::kDp) == 1) return;
  if (++passes_ % options_.backward_passes_per_step != 0) return;
  const auto& group = job_.group(Group::kDp);
  const auto replicas = [&](const char* purpose) {
    return collective::wrap(*group, session.job().mailbox(), session.job().presence(),
                            {purpose, session.members(Group::kDp), session.patience()});
  };
  const auto bucket_bytes = static_cast<std::int64_t>(options_.bucket_cap_mb * (1 << 20));
  const auto all = replicas("averaging gradients");
  data_parallel::reduce_gradients(own(tree_.parameters()), *all, bucket_bytes,
                                  data_parallel::mean_over(*all, all->size()));
  if (options_.broadcast_buffers) {
    data_parallel::broadcast_buffers(own(tree_.buffers()), *replicas("broadcasting buffers"));
  }
}

NamedTensors Model::own(const std::vector<Held>& all) const {
  NamedTensors mine;
  for (const auto& held : all) {
    if (owns(held)) mine.push_back({held.name, held.tensor});
  }
  return mine;
}

}  // namespace lamina::face
