// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lamina/checkpoint/save.h"
#include "lamina/collective/ranks.h"
#include "lamina/distributed_optimizer/optimizer.h"
#include "lamina/job_checkpoint/about.h"
#include "lamina/job_checkpoint/reader.h"
#include "lamina/model/parameter_table.h"
#include "lamina/optim/loss_scale.h"
#include "lamina/pipeline/job.h"
#include "lamina/plan/kept_partition.h"
#include "lamina/sharding/sharding.h"

namespace lamina::job_checkpoint {

class Resumption;

// An optimizer of a job, as a face lends it to the job's checkpoints. In what it says of one and gets, states are
// dictionaries of tensors and numbers, of what stands in this rank's groups.
class OptimizerAccess {
 public:
  virtual ~OptimizerAccess() = default;

  virtual distributed_optimizer::Optimizer& engine() = 0;
  virtual distributed_optimizer::UserOptimizer& user() = 0;
  // The names that its class may have in a checkpoint; it is saved under the first.
  virtual std::vector<std::string> class_names() const = 0;
  virtual std::vector<value::Dict> options() const = 0;  // of its groups
  virtual value::Value rest() const = 0;                 // of its state, besides
  // Options that its step needs in a group, and that these are without.
  virtual std::vector<std::string> lacking(std::size_t group, const value::Dict& options) const = 0;
  // Loads the options of groups alone, before the cut, where schedules may read and write them; false: not possible.
  virtual bool load_options(const OptimizerAbout& /*about*/) { return false; }
  // Masters stay.
  virtual void load(const std::map<std::string, value::Dict>& states, const OptimizerAbout& about) = 0;
};

// A job on one rank, as a face lends it to the job's checkpoints. Questions about what is cut are asked when it is.
class JobAccess {
 public:
  JobAccess(collective::Ranks ranks, pipeline::Job& steps) : ranks_(std::move(ranks)), steps_(steps) {}
  virtual ~JobAccess() = default;
  JobAccess(const JobAccess&) = delete;

  const collective::Ranks& ranks() const { return ranks_; }
  pipeline::Job& steps() const { return steps_; }
  // All ranks of the job, as saves and loads know them.
  checkpoint::Peers peers() const {
    return {ranks_.everyone(), ranks_.mailbox, ranks_.patience(), [&steps = steps_] { steps.goes_on(); }};
  }

  virtual bool has_model() const = 0;
  virtual bool is_cut() const = 0;
  virtual bool accumulates() const = 0;  // between the backward passes of one reduction
  virtual std::vector<NamesOf> model_state() const = 0;
  // The shape of the whole that a tensor of the model is, or a slice of it; also before the model is cut.
  virtual std::vector<std::int64_t> whole_shape(const at::Tensor& tensor) const { return tensor.sizes().vec(); }
  virtual const model::ParameterTable& table() const = 0;
  virtual sharding::Sharding* sharding() const = 0;        // nullptr where nothing is sharded
  virtual plan::KeptPartition partition() const = 0;       // of each module
  virtual std::vector<OptimizerAccess*> optimizers() = 0;  // that are meant, in their order
  virtual optim::LossScale* loss_scale() const = 0;        // nullptr where there is none
  // Makes what was put into the optimizers since the model was cut a part of the job; does so, and what else it takes
  // to load something into what is cut. Collective.
  virtual void settle() = 0;
  virtual void begin_load() { settle(); }

  // To be saved.
  virtual value::Value user_content() = 0;                           // of the first rank
  virtual std::map<std::string, std::string> texts() { return {}; }  // further files, by name; the first rank's
  virtual value::Dict extra_states() { return {}; }                  // of modules here, by name
  virtual value::Value generators() { return {}; }                   // but the engine's

  // Saved ones; each may throw for what it does not know, before anything is changed.
  virtual void take_content(const value::Value& content) = 0;
  // Takes what lies in a pickle, which may not be there; `known` is what of it is plain, as it was read as data.
  virtual void take_pickle(const std::filesystem::path& file, const value::Value& known) = 0;
  virtual void take_extra_states(const value::Value& states) {}
  virtual void take_generators(const value::Value& states) {}
  // Then, in this order.
  virtual void load_extra_states() {}
  virtual void set_generators() {}

  // Has a resumption wait for the cut, in the place of one that waits; nullptr: nothing waits any more.
  virtual void wait_for_cut(std::shared_ptr<Resumption> resumption) = 0;
  // Loads a model's state, as a whole on each rank, with its names made those that the model has here.
  virtual void load_translated(std::map<std::string, at::Tensor> state) = 0;

 private:
  const collective::Ranks ranks_;
  pipeline::Job& steps_;
};

// Throw base::UsageError where there is no model, and where there is nothing yet, or not now, to be saved.
void require_model(bool has_model, const std::string& call);
void require_ready(const JobAccess& job);

// Gives a parameter or buffer that is here, or this rank's shard of it.
inline at::Tensor held_here(const JobAccess& job, const at::Tensor& tensor) {
  auto* sharding = job.sharding();
  const auto number = sharding == nullptr ? std::nullopt : sharding->find(tensor);
  return number ? sharding->shard(*number) : tensor;
}

}  // namespace lamina::job_checkpoint
