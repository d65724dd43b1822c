// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/backward_watch.h"

#include "lamina/base/log.h"
#include "lamina/base/str.h"

namespace lamina::pipeline {

void BackwardWatch::begin_step(const remote::Tensors& parameters, std::int64_t backwards) {
  if (over_) return;
  announced_ = false;
  backwards_ = backwards;
  before_ = marks(parameters);
}

void BackwardWatch::end_step(const remote::Tensors& parameters, std::int64_t backwards) {
  if (over_) return;
  over_ = announced_ || backwards != backwards_ || marks(parameters) != before_;
  if (!over_) return;
  before_.clear();
  if (announced_) return;
  base::log_warning(
      base::str("a step has called loss.backward(), which adds up the gradients of its ", microbatches_,
                " microbatches: model.backward(loss) divides them by their number, as the plain loop over the batch "
                "has them. Call "
                "that, or make the model with average_grads_across_microbatches=False if the sum is wanted"));
}

std::vector<BackwardWatch::Mark> BackwardWatch::marks(const remote::Tensors& parameters) {
  std::vector<Mark> made;
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.grad();
    const bool versioned = gradient.defined() && !gradient.is_inference();
    made.emplace_back(gradient.unsafeGetTensorImpl(), versioned ? gradient._version() : 0);
  }
  return made;
}

}  // namespace lamina::pipeline
