// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ThreadLocalState.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/frontend/module_tree.h"
#include "lamina/frontend/tracer.h"
#include "lamina/runtime/process_state.h"
#include "lamina/session/step_check.h"

namespace lamina::frontend {

// A call of a torch::nn model as if it were not cut: see [Note: step check]. The modules are the layout's own. While
// they are called plainly their tensors have the plain model's values, their layers are whole, and their calls stay
// here.
class TorchPlainModel : public session::PlainModel {
 public:
  // In the thread of the body that makes the call, whose modes and random numbers count. The tree outlives it.
  TorchPlainModel(const TorchModuleTree& tree, Example call);

  std::string run_forward(const std::shared_ptr<verification::PlainRun>& run,
                          const std::optional<session::PlainValues>& values) override;
  std::string run_backward(const std::map<std::int64_t, at::Tensor>& gradients) override;

 private:
  void take_values(const std::optional<session::PlainValues>& values);

  const TorchModuleTree& tree_;
  const Example call_;
  const at::ThreadLocalState modes_;
  runtime::ProcessState state_;
  std::shared_ptr<verification::PlainRun> run_;
  std::vector<std::pair<at::Tensor, at::Tensor>> values_;  // of the model's tensors
  std::vector<at::Tensor> returned_;
};

}  // namespace lamina::frontend
