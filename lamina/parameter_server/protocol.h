// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "lamina/transport/message.h"
#include "lamina/value/failure.h"
#include "lamina/value/value.h"

// The protocol of modules and parameters that a rank owns and others use: every request has one answer, and the end of
// a context has none.
namespace lamina::parameter_server {

inline constexpr transport::Kind kRequest = "request";
inline constexpr transport::Kind kAnswer = "answer";
inline constexpr transport::Kind kContextEnd = "context end";

// [Note: contexts] A *context* is one iteration of one trainer, its origin: the calls in it, of modules on any rank,
// the backward through them, and the updates with its gradients. Each rank that takes part keeps a part of the context:
// graphs of the calls that it has served, and gradients of its own leaves, which belong to this context alone. Each
// leaf is updated once at most. A context ends when its origin says so, or is lost; then its parts go on all ranks.
struct ContextId {
  base::Rank origin;
  std::int64_t number = 0;  // counts those of its origin from 1; 0: none

  explicit operator bool() const { return number != 0; }
  friend constexpr auto operator<=>(const ContextId&, const ContextId&) = default;
  friend std::ostream& operator<<(std::ostream& out, const ContextId& id) {
    return out << "context " << id.number << " of rank " << id.origin;
  }
};

// The address of an object: `job` tells the owner's life from others that had the same rank.
struct Address {
  base::Rank owner;
  std::int64_t job = 0;
  std::int64_t number = 0;

  friend constexpr auto operator<=>(const Address&, const Address&) = default;
};

// A parameter that lies on its owner.
struct RemoteParameter {
  Address address;
  std::string name;  // in its module; "" for one that was placed alone
  std::vector<std::int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  bool requires_grad = true;
};

// A module, or a parameter, that is called on its owner.
struct RemoteModule {
  Address address;
  std::string name;  // "" where it has none: then nobody finds it
  std::vector<RemoteParameter> parameters;

  // For messages: its name, or its number.
  std::string label() const;
};

value::Value to_value(const RemoteModule& module);
RemoteModule to_remote_module(const value::Value& value);  // throws base::FormatError

// The bodies of requests and of their answers:
//   kFind       name                                                      -> RemoteModule, once there is one
//   kCall       modes, arguments                                          -> outputs, reached ("" for no graph)
//   kBackward   number of the call, keep_graph, watched outputs, gradients of its outputs -> those of its arguments
//   kOptimizer  functional's name, hyper-parameters, numbers of parameters -> the optimizer's number
//   kNorm       -                                                         -> sum of its gradients' squares
//   kStep       norm of all gradients, hyper-parameters or None           -> None
//   kShare      Shared                                                    -> None
enum class Verb : std::int64_t { kFind, kCall, kBackward, kOptimizer, kNorm, kStep, kShare };
inline constexpr std::int64_t kVerbs = 7;

struct Request {
  Verb verb = Verb::kFind;
  base::Rank asker;
  std::int64_t number = 0;   // counts those of the asker
  std::int64_t job = 0;      // as in Address; 0 in kFind
  std::int64_t subject = 0;  // of the module or optimizer that it is about
  ContextId context;
  value::Value body;
};

struct Answer {
  std::int64_t number = 0;  // of the request
  value::Value body;
  std::optional<value::Failure> failure;
};

// The readers throw base::FormatError.
transport::Message to_message(Request request);
Request to_request(transport::Message&& message);
transport::Message to_message(Answer answer, base::Rank asker);
Answer to_answer(transport::Message&& message);
transport::Message to_message(const ContextId& ended);
ContextId to_ended_context(const transport::Message& message);

// Parts of a body. Throws base::FormatError unless they are `count`.
std::vector<value::Value> to_parts(value::Value&& body, std::size_t count);
value::Value to_list(const std::vector<at::Tensor>& tensors);  // undefined ones stay so
std::vector<at::Tensor> to_tensors(const value::Value& list);

}  // namespace lamina::parameter_server
