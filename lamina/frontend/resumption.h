// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lamina/frontend/job_state.h"
#include "lamina/plan/kept_partition.h"
#include "lamina/session/checkpoint_reader.h"

namespace lamina::frontend {

// The end of the name of a state that is no tensor but a number.
inline constexpr char kNumberMark = '#';

// A checkpoint that is loaded into a job: at once, or when its model is cut.
class Resumption {
 public:
  // The job, which has a model, outlives it.
  Resumption(Current& job, std::shared_ptr<session::CheckpointReader> reader, bool strict, bool load_optimizer)
      : job_(job), reader_(std::move(reader)), strict_(strict), load_optimizer_(load_optimizer) {}

  // The partition that was saved, where the job has as many; else of no module.
  plan::KeptPartition partition() const;
  // Throws base::UsageError where the checkpoint does not fit the model and the optimizers.
  void check() const;
  // Loads it into a model that is cut; collective over the world. Nothing is changed where that fails on a rank.
  void load();
  // Reads where this rank's generator goes on, in the layout of the checkpoint alone: before anything is changed.
  void read_generator();
  // Has counters and what read_generator() has read go on where they were.
  void go_on();

 private:
  // Memory for a state that this rank is to have, which is filled when the checkpoint is read.
  struct State {
    std::string parameter, key;
    at::Tensor local, staged;
  };
  struct Planned {
    std::shared_ptr<JobOptimizer> optimizer;
    std::vector<Fields> options;  // of its groups
    std::vector<State> states;
  };
  using Plan = std::vector<Planned>;

  std::vector<value::Dict> saved_optimizers() const;
  void check_optimizers() const;
  Plan planned();
  Planned planned(int number, const std::shared_ptr<JobOptimizer>& optimizer, const session::CheckpointParts& parts);
  void apply(Plan plan);

  Current& job_;
  const std::shared_ptr<session::CheckpointReader> reader_;
  const bool strict_, load_optimizer_;
  at::Tensor generator_;  // undefined where it does not go on
};

}  // namespace lamina::frontend
