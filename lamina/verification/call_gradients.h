// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace lamina::verification {

// The gradients that a step gives to what its call of the model returned, and the parameters that it uses outside of
// that call, too. Thread-safe.
class CallGradients {
 public:
  using Named = std::pair<std::string, at::Tensor>;

  // `given`: what the model is called with.
  CallGradients(std::span<const Named> parameters, std::span<const at::Tensor> given);

  // The call has returned these: from now on gradients that come there are kept.
  void see_outputs(std::span<const at::Tensor> outputs);
  // A backward of these begins.
  void see_backward(std::span<const at::Tensor> tensors);

  // Gradients by the number of what was returned. Nothing where they are not known apart from those that come of the
  // model's own use of it. `made_by_call`: of what the model's call made, which are known anyway; undefined: none.
  std::optional<std::map<std::int64_t, at::Tensor>> gradients(std::span<const at::Tensor> made_by_call) const;
  // Names of parameters whose gradients are not those of the call alone.
  std::set<std::string> used_beside() const;

 private:
  using Edges = std::unordered_set<torch::autograd::Edge>;
  struct Kept;

  Edges leave_out_of(std::span<const at::Tensor> tensors);  // under the lock
  Edges outputs() const;                                    // under the lock

  const std::shared_ptr<Kept> kept_;  // hooks of tensors have it, too
  std::map<const at::TensorImpl*, std::string> names_;
  std::map<std::int64_t, torch::autograd::Edge> outputs_;  // by number, in the graph
  Edges reached_;                                          // of these, those that backwards of the step reach first
  std::set<std::string> beside_;
};

}  // namespace lamina::verification
