// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lamina/remote/graph.h"
#include "lamina/transport/message.h"
#include "lamina/value/value.h"

// What the two sides of a remote call agree on: the bodies and state blocks of their messages. All readers throw
// base::FormatError.
namespace lamina::remote {

inline constexpr transport::Kind kForward = "forward";    // run a module on `body`; answered by kResult or kError
inline constexpr transport::Kind kBackward = "backward";  // run a backward with the gradients in `body`; answered alike
inline constexpr transport::Kind kAsk = "ask";            // send outputs of a call, as `deliveries` says
inline constexpr transport::Kind kValues = "values";  // outputs, or the Failure that came instead, under their names
inline constexpr transport::Kind kResult = "result";  // the answer to a call
inline constexpr transport::Kind kError = "error";    // the answer to a call that raised; `body` is a Failure

// Asks for the backward of the caller's call number `forward` of the same step and microbatch.
struct BackwardRequest {
  std::int64_t forward = 0;
  BackwardOptions options;
  // Of the outputs (see [Note: differentiable tensors]): tensors, references, or lists of both to be added.
  value::List gradients;
};

value::Value to_value(const BackwardRequest& request);
BackwardRequest to_backward_request(const value::Value& value);

// A list of tensors.
value::Value to_value(const Tensors& tensors);
Tensors to_tensors(const value::Value& value);
// '1' for each tensor that is defined, '0' for each that is not; and a number that stands for such a pattern, never 0.
std::string pattern(const Tensors& tensors);
std::uint64_t fingerprint(const std::string& pattern);

// The answer to a forward that the caller waits for.
struct ForwardAnswer {
  value::Value outputs;   // references stand for arguments that are handed back as they are
  value::List written;    // pairs: the number of an argument that the module wrote to, and its new value
  std::string reached;    // CalleeGraph::reached()
  bool saw_data = false;  // the module let data decide: see data_watch.h
  std::string views;      // of arguments, among the outputs: see views.h
};

value::Value to_value(ForwardAnswer answer);
ForwardAnswer to_forward_answer(value::Value value);

// The state that a call brings. Calls that are alike have the same modes and the same state of the face.
struct CallState {
  std::string modes;                 // torch's: runtime/ambient.h
  std::vector<std::uint64_t> seeds;  // of the streams that the call starts: runtime/streams.h
  std::string of_face;               // model/modules.h
  std::string flags;                 // ParameterFlags::to_bytes()

  friend bool operator==(const CallState&, const CallState&) = default;
};

std::string join_state(const CallState& state);
CallState split_state(std::string_view state);

}  // namespace lamina::remote
