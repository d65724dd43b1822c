// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace emulated {

// Returns the results of a call as they would be on the meta device. Many of torch's meta kernels are written in
// Python, which takes a fifth of a millisecond: what was asked before is known. Throws what the meta kernel throws.
torch::jit::Stack outline_call(const c10::OperatorHandle& operation, const torch::jit::Stack& arguments);

}  // namespace emulated
