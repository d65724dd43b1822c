// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/batch_norms.h"

#include <torch/nn/modules/batchnorm.h>

namespace lamina::frontend {
namespace {

template <class Impl>
bool add(std::vector<runtime::BatchNorm>& found, const std::string& name, const torch::nn::Module& module) {
  const auto* norm = dynamic_cast<const Impl*>(&module);
  if (norm == nullptr) return false;
  if (!norm->running_mean.defined() || !norm->running_var.defined() || !norm->num_batches_tracked.defined())
    return true;
  found.push_back({name, norm->running_mean, norm->running_var, norm->num_batches_tracked, norm->options.momentum()});
  return true;
}

}  // namespace

std::vector<runtime::BatchNorm> batch_norms(const torch::nn::Module& root) {
  std::vector<runtime::BatchNorm> found;
  for (const auto& item : root.named_modules()) {
    const auto& module = *item.value();
    [[maybe_unused]] const bool is_one = add<torch::nn::BatchNorm1dImpl>(found, item.key(), module) ||
                                         add<torch::nn::BatchNorm2dImpl>(found, item.key(), module) ||
                                         add<torch::nn::BatchNorm3dImpl>(found, item.key(), module);
  }
  return found;
}

}  // namespace lamina::frontend
