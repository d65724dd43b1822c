// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lamina/remote/graph.h"
#include "lamina/transport/message.h"
#include "lamina/value/failure.h"
#include "lamina/value/value.h"

// The protocol of remote calls: all that their two sides, and the readers of their results, say to each other.
//
//   caller                                owner                                reader of an output
//     | -- ForwardRequest, BackwardRequest -> |                                       |
//     |                                       | -- Values (what the request routes) ->|
//     | <------------------- Answer (result) -|                                       |
//     | <------------ Answer that it is done -|    (if what it has set off goes on after the first)
//     | -- Ask (an output that was not routed)|                                       |
//     |                                       | -- Values --------------------------->|
//
// A call has one id in all of them, which its caller gives it. Each struct below is one message; to_message() writes
// it, and the reader with its name reads it. All readers throw base::FormatError.
namespace lamina::remote {

inline constexpr transport::Kind kForward = "forward";
inline constexpr transport::Kind kBackward = "backward";
inline constexpr transport::Kind kAsk = "ask";
inline constexpr transport::Kind kValues = "values";
inline constexpr transport::Kind kResult = "result";  // an Answer
inline constexpr transport::Kind kError = "error";    // an Answer with a failure

// [Note: deliveries] A value goes straight from the rank that made it to each rank that needs it, under a name of its
// own, which the issuer of the call gives it. The maker is told to send output `output` to rank `to` as `name`, and the
// reader waits for that name. A name is used once, so nobody has to be told when a value may be forgotten.
struct Delivery {
  std::int64_t output = 0;
  base::Rank to;
  base::CallId name;
  friend bool operator==(const Delivery&, const Delivery&) = default;
};

// Says that nobody will ask for the outputs of a call any more, or that its backward will not be run.
struct Release {
  base::CallId call;
  bool graph = false;
  friend bool operator==(const Release&, const Release&) = default;
};

// The state that a call brings. Calls that are alike have the same modes and the same state of the face.
struct CallState {
  std::string modes;                 // torch's: runtime/modes.h
  std::vector<std::uint64_t> seeds;  // of the streams that the call starts: runtime/rng_streams.h
  std::string of_face;               // model/modules.h
  std::string flags;                 // ParameterFlags::to_bytes()

  friend bool operator==(const CallState&, const CallState&) = default;
};

std::string to_bytes(const CallState& state);

// A request holds of these what both kinds of it have.
struct Request {
  base::CallId call;
  base::ModuleId module;
  std::vector<Delivery> deliveries;  // what goes where
  std::vector<Release> released;     // what of earlier calls may be forgotten
  std::uint64_t expected = 0;        // fingerprint of the outputs as the caller expects them; 0: it waits for them
  std::int64_t after = -1;           // the number of the caller's call that this one must not overtake; -1: of none
};

// Asks to run `module` on `arguments`, of which references are tensors that others deliver.
struct ForwardRequest : Request {
  CallState state;
  std::string news;  // model/modules.h
  value::Value arguments;
};

// Asks for the backward of the caller's call number `forward` of the same step and microbatch.
struct BackwardRequest : Request {
  std::int64_t forward = 0;
  BackwardOptions options;
  std::string flags;  // ParameterFlags::to_bytes()
  // A list, of the outputs (see [Note: differentiable tensors]): tensors, references, or lists of both to be added.
  value::Value gradients = value::List();
};

// Asks to send an output of a call that its request did not say where to send.
struct Ask {
  base::CallId call;
  Delivery delivery;
};

// Outputs under the names of their deliveries, or what came instead of them.
struct Values {
  std::vector<base::CallId> names;
  std::variant<Tensors, value::Failure> values;
};

// The answer to a call. The caller gets one, and a second one later where the first says that it is not done.
struct Answer {
  base::CallId call;
  bool done = true;                       // nothing that the call has set off still runs
  std::string note;                       // for the caller's face, in its format
  value::Value result;                    // for a caller that waits: of a ForwardAnswer, or gradients; else None
  std::vector<base::CallId> names;        // the deliveries that go to the caller itself
  Tensors outputs;                        // under these names
  std::optional<value::Failure> failure;  // instead of both
};

transport::Message to_message(ForwardRequest request);
transport::Message to_message(BackwardRequest request);
transport::Message to_message(const Ask& ask);
transport::Message to_message(Values values);
transport::Message to_message(Answer answer);

ForwardRequest to_forward_request(transport::Message&& message);
BackwardRequest to_backward_request(transport::Message&& message);
Ask to_ask(const transport::Message& message);
Values to_values(transport::Message&& message);
Answer to_answer(transport::Message&& message);

// The result of a forward that the caller waits for.
struct ForwardAnswer {
  value::Value outputs;   // references stand for arguments that are handed back as they are
  value::List written;    // pairs: the number of an argument that the module wrote to, and its new value
  std::string reached;    // CalleeGraph::reached()
  bool saw_data = false;  // the module let data decide: see data_watch.h
  std::string views;      // of arguments, among the outputs: see views.h
};

value::Value to_value(ForwardAnswer answer);
ForwardAnswer to_forward_answer(value::Value value);

// A list of tensors: the result of a backward that the caller waits for.
value::Value to_value(const Tensors& tensors);
Tensors to_tensors(const value::Value& value);

// '1' for each tensor that is defined, '0' for each that is not; and a number that stands for such a pattern, never 0.
std::string pattern(const Tensors& tensors);
std::uint64_t fingerprint(const std::string& pattern);

}  // namespace lamina::remote
