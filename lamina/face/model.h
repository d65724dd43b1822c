// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "lamina/data_parallel/named_tensor.h"
#include "lamina/face/first_call.h"
#include "lamina/face/module_tree.h"
#include "lamina/pipeline/graph.h"

namespace lamina {

// How a DistributedModel treats gradients. Of ddp: after how many backward passes they are averaged over the replicas
// (until then they add up on each), about how many MiB travel at a time, and whether buffers then get the values of
// the first replica. A pass is a step in which there was a backward or, outside of steps, a backward.
struct ModelOptions {
  bool average_grads_across_microbatches = true;
  int backward_passes_per_step = 1;
  double bucket_cap_mb = 25;
  bool broadcast_buffers = true;
};

namespace face {

struct Current;
class Routing;

using NamedTensors = std::vector<data_parallel::NamedTensor>;

// The job's model: who owns what of it, and what is done with all of it. Everything but a call of it, which needs its
// type (distributed_model.h).
class Model {
 public:
  Model(std::shared_ptr<torch::nn::Module> root, ModelOptions options);
  ~Model();

  const ModuleTree& tree() const { return tree_; }
  bool partitioned() const { return !owners_.empty(); }
  // Throw base::UsageError before the model is partitioned.
  int owner_of(int node) const;
  bool owns(const Held& held) const { return owner_of(held.node) == partition_; }
  const std::string& report() const;

  // Before the calls of a body: in the step in which the model is cut it waits until it is.
  bool wants_first_call() const;
  void first_call(Example example);

  // Runs one step; see Job::run_step. Cuts the model, the first time.
  std::vector<value::Value> run_step(const pipeline::Job::Body& body, const base::Call& call);

  bool owns_tensor(const at::Tensor& tensor) const;  // of parameters; true for what is not the model's

  // See DistributedModel.
  void backward(const pipeline::Tensors& tensors, const pipeline::Tensors& gradients);
  at::Tensor clip_grad_norm(double max_norm, double norm_type, const std::source_location& site);
  // Collective over the pipeline.
  std::vector<std::pair<std::string, at::Tensor>> state(const std::source_location& site);
  void load(const std::map<std::string, at::Tensor>& state);

 private:
  void cut(const std::optional<Example>& example);
  std::vector<int> agree(const std::optional<Example>& example);
  std::vector<value::Value> run_pipelined(const pipeline::Job::Body& body, const base::Call& call);
  std::vector<value::Value> run_first(const pipeline::Job::Body& body, const base::Call& call);
  void give_values();
  void let_go();
  void finish_pass();
  NamedTensors own(const std::vector<Held>& all) const;

  Current& job_;
  const ModelOptions options_;
  const ModuleTree tree_;
  const int partition_;
  std::vector<int> owners_;  // by node; none before the model is cut
  std::string report_;
  std::shared_ptr<FirstCall> first_call_;
  std::shared_ptr<Routing> routing_;
  std::atomic<bool> passed_ = false;  // there was a backward in this step
  int passes_ = 0;
};

// Makes it the job's.
void set_model(std::shared_ptr<Model> model);

// The job's model; throws base::UsageError where there is none, and inside a step, where `what` is not allowed.
Model& model_outside_step(const std::string& what);

// A step's bodies: with the job's model, if there is one.
std::vector<value::Value> run_step(const pipeline::Job::Body& body, const base::Call& call);

}  // namespace face
}  // namespace lamina
