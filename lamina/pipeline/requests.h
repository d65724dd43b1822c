// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

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

// The state that a call brings. Calls that are alike have the same modes and the same state of the face.
struct CallState {
  std::string modes;                  // torch's: ambient.h
  std::optional<std::uint64_t> seed;  // where the module starts a stream: streams.h
  std::string of_face;                // modules.h

  friend bool operator==(const CallState&, const CallState&) = default;
};

std::string join_state(const CallState& state);
CallState split_state(std::string_view state);

}  // namespace lamina::pipeline
