// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/ordered_gradients.h"

#include <ATen/ops/add.h>
#include <c10/core/GradMode.h>

#include <utility>

namespace lamina::runtime {
namespace {

// As the engine of autograd accumulates: in place, unless somebody differentiates the gradient.
void add(at::Tensor& sum, const at::Tensor& part) {
  if (!part.defined()) return;
  if (!sum.defined()) {
    sum = part;
  } else if (sum.requires_grad() || part.requires_grad()) {
    sum = at::add(sum, part);
  } else if (sum.is_sparse() && !part.is_sparse()) {
    const at::NoGradGuard no_grad;
    sum = at::add(part, sum);
  } else {
    const at::NoGradGuard no_grad;
    sum.add_(part);
  }
}

}  // namespace

void OrderedGradients::begin(std::vector<at::Tensor> parameters) {
  parts_.clear();
  current_.reset();
  parameters_ = std::move(parameters);
  before_.assign(parameters_.size(), {});
  exchange(before_);
}

void OrderedGradients::turn_of(base::Microbatch microbatch, bool in_weights) {
  const Part part{microbatch, in_weights};
  if (current_ == part) return;
  if (current_) exchange(parts_[*current_]);
  current_ = part;
  auto& own = parts_[part];
  own.resize(parameters_.size());
  exchange(own);
}

void OrderedGradients::end(bool keep) {
  if (current_) exchange(parts_[*current_]);
  current_.reset();
  if (keep) {
    for (auto& [part, gradients] : parts_) {
      for (std::size_t i = 0; i < before_.size(); ++i) add(before_[i], std::exchange(gradients[i], {}));
    }
  }
  parts_.clear();
  exchange(before_);
  parameters_.clear();
}

void OrderedGradients::exchange(Gradients& gradients) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) std::swap(parameters_[i].mutable_grad(), gradients[i]);
}

}  // namespace lamina::runtime
