// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace lamina::value {

// The key above autograd of tensors whose value is not here: references ([Note: reference tensors]), released tensors
// ([Note: released tensors]), values that are away; and of slices ([Note: guarded slices]). It is the one key that
// torch keeps for wrappers outside it, marked as for tests; the tests of those two are the gate of every upgrade of
// torch.
constexpr auto kWrapperKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Gives a tensor these keys.
void set_keys(const at::Tensor& tensor, c10::DispatchKeySet keys);

}  // namespace lamina::value
