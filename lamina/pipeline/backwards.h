// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "lamina/model/gradient_watch.h"
#include "lamina/optim/loss_scale.h"
#include "lamina/pipeline/job.h"

namespace lamina::pipeline {

// The backwards of a job's model, and what is to be said of others.
//
// A body that calls loss.backward() works, but adds up the gradients of the microbatches, which the model's own
// backward divides by their number: another training than the plain loop's, without a word. That is told, once, on the
// rank that runs the bodies, which looks until it has seen one backward or the other.
//
// Where losses are scaled, gradients of any other backward are not: a step that divides all of them makes those too
// small. Each such backward counts, on the rank that runs it.
class Backwards {
 public:
  using Parameters = std::function<remote::Tensors()>;
  using Run = std::function<StepResult(StepSpec spec)>;

  // With `averages` the model's own backward in a step makes gradients a mean over the samples of all microbatches, and
  // of all copies: see [Note: uneven batches].
  Backwards(Job& job, bool averages) : job_(job), alone_(job.alone()), averages_(averages), seen_(!averages) {}

  // Losses of the model's own backward are multiplied by that, while it lives.
  void scale_by(std::weak_ptr<const optim::LossScale> scale) { loss_scale_ = std::move(scale); }
  // Where other backwards are counted: these are noticed by the gradients that they leave in these parameters, as they
  // are now. `forgets`: gradients lie in the parameters, so that those of others are gone when there are none.
  void watch(std::span<const at::Tensor> parameters, bool forgets);
  // Has other backwards counted where losses are not scaled, too, until it is told no more.
  void count_others(bool counts) { counts_others_ = counts; }
  // Counts what other backwards have left while they were counted, and what of it was there when gradients were last
  // forgotten, of all parameters.
  std::int64_t plain() const { return *plain_; }
  std::int64_t plain_forgotten() const { return forgotten_; }
  void forget_plain() { forgotten_ = plain(); }

  // How many of the model's own have run here.
  std::int64_t count() const { return count_; }

  // From now on it divides them by nothing: somebody else averages them.
  void add_up();

  // Runs a step of the model with these parameters by `run`. Throws what that throws.
  StepResult run_step(StepSpec spec, const Parameters& parameters, const Run& run);

  // The model's own, in a step or outside; see remote::run_backward. The first one of a step learns of the batches of
  // other copies.
  void run(const remote::Tensors& tensors, const remote::Tensors& gradients);

 private:
  // Facts that a backward changes.
  struct Found {
    std::map<const void*, std::pair<const void*, std::uint64_t>>
        gradients;               // by parameter; another one when it changes
    std::int64_t elsewhere = 0;  // backwards of other ranks' modules that this one has asked for
  };
  static Found look(const Job& job, const Parameters& parameters);
  static bool had_backward(const Job& job, const Found& before, const Parameters& parameters);
  void tell() const;
  bool counts() const;
  // Factors of the losses of a backward.
  double loss_scale() const;
  double scale_in_step();

  Job& job_;
  const bool alone_;  // known when the job has ended, too
  bool averages_;
  std::weak_ptr<const optim::LossScale> loss_scale_;
  std::atomic<std::int64_t> count_ = 0;
  const std::shared_ptr<std::atomic<std::int64_t>> plain_ = std::make_shared<std::atomic<std::int64_t>>(0);
  std::int64_t forgotten_ = 0;
  std::unique_ptr<model::GradientWatch> watch_;
  bool counts_others_ = false;
  bool seen_;
  bool announced_ = false;
  // The step that this rank leads.
  struct Step {
    int microbatches = 1;
    std::vector<std::int64_t> samples;
    std::function<Copies(std::int64_t)> tell_samples;
    std::optional<Copies> copies;  // when the first backward has come
    base::Microbatch inline_body;  // the one that runs in the caller's thread
  };
  Step step_;
};

}  // namespace lamina::pipeline
