// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

// Operations on slices: see [Note: guarded slices].
namespace lamina::value {

// Calls an operation with guarded slices among its arguments, of which `slice` is one. Throws base::UsageError where it
// would take the slice for the whole.
void call_guarded(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
                  const at::Tensor& slice);

// Throws for a guarded slice that `operation` is about to take for the whole, but in an update.
void require_whole(const at::Tensor& tensor, const std::string& operation);

}  // namespace lamina::value
