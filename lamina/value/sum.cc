// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/add.h>

#include "lamina/base/error.h"
#include "lamina/value/reference_impl.h"

namespace lamina::value {

Sum::Sum(std::vector<at::Tensor> parts) : parts_(std::move(parts)) {
  for (const auto& part : parts_) versions_.push_back(version_of(part));
}

at::Tensor Sum::take() {
  {
    const std::scoped_lock lock(mutex_);
    if (value_.defined()) return value_;
  }
  // Not under the mutex: whoever waits for a part may hold Python's GIL and give it up meanwhile. Two threads may add
  // the same; one of them is first.
  const CleanDispatch clean;
  at::Tensor total;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    materialise(parts_[i]);
    if (version_of(parts_[i]) != versions_[i]) {
      throw base::UsageError(
          "a gradient was written to before the sum that it is part of was read; write to a clone of it",
          base::Code{"step-gradient-written"});
    }
    total = total.defined() ? at::add(total, parts_[i]) : parts_[i];
  }
  const std::scoped_lock lock(mutex_);
  if (!value_.defined()) value_ = std::move(total);
  return value_;
}

}  // namespace lamina::value
