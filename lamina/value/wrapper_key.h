// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/DispatchKey.h>

namespace lamina::value {

// The key above autograd of tensors whose value is not here: references ([Note: reference tensors]) and released
// tensors
// ([Note: released tensors]). It is the one key that torch keeps for wrappers outside it, marked as for tests; the
// tests of those two are the gate of every upgrade of torch.
constexpr auto kWrapperKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

}  // namespace lamina::value
