// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace lamina::value {

// Has the layer of a guarded slice compute in the place of an operation, see [Note: layers by their operations]; false
// for any other operation.
bool call_layer(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace lamina::value
