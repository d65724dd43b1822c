// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lamina/model/call_hooks.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::verification {

// A microbatch of a model that is not cut, recorded in memory, to which a step in its layout is compared.
class PlainRun {
 public:
  explicit PlainRun(const std::vector<std::string>& modules);

  // A call of one of the modules, by its number.
  std::unique_ptr<model::HookedCall> begin(std::int64_t module, std::span<const at::Tensor> inputs) const;
  digests::RankRecording recording() const;
  void forget_gradients() { without_gradients_ = true; }

 private:
  const std::shared_ptr<RunRecorder> recorder_;
  model::CallHooks hooks_;
  bool without_gradients_ = false;
};

}  // namespace lamina::verification
