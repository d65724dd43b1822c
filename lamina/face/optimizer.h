// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>

#include "lamina/face/when_cut.h"

namespace lamina {

namespace face {
void trim(torch::optim::Optimizer& optimizer, const Owns& owns);
}  // namespace face

// An optimizer of the whole model, made one of this rank's part of it: when the model is cut, parameters that other
// ranks own leave its groups. Any of torch's, made of DistributedModel::parameters():
//
//     lamina::DistributedOptimizer adamw(torch::optim::AdamW(model.parameters(), options));
//     lamina::DistributedOptimizer adamw(std::make_unique<torch::optim::AdamW>(model.parameters(), options));
template <class Optimizer>
class DistributedOptimizer {
 public:
  explicit DistributedOptimizer(std::unique_ptr<Optimizer> optimizer)
      : optimizer_(std::move(optimizer)),
        trim_(std::make_shared<face::Trim>([kept = optimizer_](const auto& owns) { face::trim(*kept, owns); })) {
    face::when_cut(trim_);
  }
  explicit DistributedOptimizer(Optimizer&& optimizer)
      : DistributedOptimizer(std::make_unique<Optimizer>(std::move(optimizer))) {}

  void step() { optimizer_->step(); }
  void zero_grad(bool set_to_none = true) { optimizer_->zero_grad(set_to_none); }

  Optimizer& operator*() { return *optimizer_; }
  Optimizer* operator->() { return optimizer_.get(); }

 private:
  std::shared_ptr<Optimizer> optimizer_;
  std::shared_ptr<face::Trim> trim_;
};

}  // namespace lamina
