// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "lamina/value/guarded_joined.h"

// Operations that take places by index in slices: see [Note: guarded slices].
namespace lamina::value {

// The argument of a call, by name; nothing where the operation has none.
std::optional<c10::IValue> argument(const c10::FunctionSchema& schema, const torch::jit::Stack& stack,
                                    const std::string& name);
std::int64_t number(const std::optional<c10::IValue>& value, std::int64_t otherwise);

// The places that each result of a call has of `tensor`; none for an operation that takes no places along one
// dimension.
std::vector<PlacesAlong> places_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                                   const at::Tensor& tensor);
// True where a view has the places that it would have of the whole.
bool has_places_of_whole(const c10::OperatorHandle& op, const std::vector<PlacesAlong>& places,
                         const at::Tensor& slice);

}  // namespace lamina::value
