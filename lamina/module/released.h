// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lamina::module {

// [Note: released tensors] A parameter or buffer that another rank owns keeps its object, shape, dtype, device and
// requires_grad, but has no storage. Its key set holds one wrapper key above autograd, whose fallback throws: reading
// metadata is always allowed, any operation on the value is base::UsageError with the text it was released with.

// The one key that torch keeps for wrappers outside it, marked as for tests; the tests of this file are the gate of
// every upgrade of torch.
constexpr auto kReleasedKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Frees the value of `tensor`; `why` is what a use of the value says. Its gradient is dropped too.
void release(at::Tensor& tensor, const std::string& why);

bool is_released(const at::Tensor& tensor);

}  // namespace lamina::module
