// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "lamina/pipeline/graph.h"
#include "lamina/value/value.h"

// What the two sides of a remote call agree on: the bodies and state blocks of their messages. All readers throw
// base::FormatError.
namespace lamina::pipeline {

// Asks for the backward of the caller's call number `forward` of the same step and microbatch.
struct BackwardRequest {
  std::int64_t forward = 0;
  bool keep_graph = false;
  Tensors gradients;  // of the outputs; see [Note: differentiable tensors]
};

value::Value to_value(const BackwardRequest& request);
BackwardRequest to_backward_request(const value::Value& value);

value::Value to_value(const Tensors& tensors);
Tensors to_tensors(const value::Value& value);

// The state that a call brings: torch's modes (ambient.h), then what the face adds (modules.h).
std::string join_state(const std::string& modes, const std::string& of_face);
std::pair<std::string, std::string> split_state(std::string_view state);

}  // namespace lamina::pipeline
