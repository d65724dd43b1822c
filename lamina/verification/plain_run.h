// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "lamina/model/call_hooks.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::verification {

// A microbatch of a model that is not cut, recorded in memory, to which a step in its layout is compared.
class PlainRun {
 public:
  // The copy of the model, and the step, are for messages.
  PlainRun(const std::vector<std::string>& modules, std::int64_t copy, std::int64_t step);

  // A call of one of the modules, by its number.
  std::unique_ptr<model::HookedCall> begin(std::int64_t module, std::span<const at::Tensor> inputs) const;
  // The parameters' gradients are recorded until end().
  void watch(std::span<const ParameterGradients::Named> parameters) { recorder_->begin_step_of(parameters); }
  // Records these, where no hooks of theirs see them.
  void see_gradients(std::span<const ParameterGradients::Named> gradients) { recorder_->see_gradients(gradients); }
  void end() {
    recorder_->end_step_of([](const auto&, const auto& gradient) { return gradient; });
  }
  // The recording without what is not to be compared.
  digests::RankRecording recording() const;
  void forget_gradients() { without_gradients_ = true; }
  // Gradients of these parameters are not those of the model's call alone.
  void leave_out(std::set<std::string> parameters) { left_out_.merge(parameters); }

 private:
  const std::shared_ptr<RunRecorder> recorder_;
  model::CallHooks hooks_;
  bool without_gradients_ = false;
  std::set<std::string> left_out_;
};

}  // namespace lamina::verification
