// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "lamina/remote/outstanding_calls.h"
#include "lamina/remote/remote_value.h"
#include "lamina/remote/views.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/value/failure.h"

namespace lamina::remote {

// A failure that a context's code was told of, by call `counter`.
struct ToldFailure {
  std::int64_t counter;
  value::Failure failure;
};

// [Note: order of calls] A module may keep state, and gradients are added in an order: of the calls of one context to
// one module each runs after the one before it, though their arguments arrive in any order. So do their backwards, and
// what these calls call in turn. Here, by module and whether it is a backward: the number of the latest call.
using CallOrder = std::map<std::pair<base::ModuleId, bool>, std::int64_t>;

// A call that returned views of its arguments, and what counts the writes to them since.
struct ReturnedViews {
  std::shared_ptr<IssuedCall> call;
  std::optional<OutputSpec> output_spec;  // to be learned when that is known
  SharedViews shared;
};

// Calls that one context has made; touched by its thread alone.
struct Issued {
  std::vector<std::shared_ptr<PendingCall>> calls;
  std::vector<std::weak_ptr<RemoteValue>> references;
  std::vector<ToldFailure> told;
  std::map<const CallProfile*, int> counts;
  CallOrder latest;
  std::vector<ReturnedViews> views;

  // The end of a context, in two parts. held(): the references that somebody keeps, other than in `results`, which
  // nobody else holds a copy of; they are to have their values before the step ends. settle() fetches those, and waits
  // until nothing runs any more that the context's calls have set off. It throws the first failure of a call that the
  // context's code was told of neither by that call nor by another one that has failed for the same cause.
  using Held = std::vector<std::shared_ptr<RemoteValue>>;
  Held held(const Tensors& results) const;
  void settle(const Held& held, OutstandingCalls& outstanding, const base::Patience& patience) const;

  // When the context's code is over: learns whether it has written to views that its calls returned. Throws
  // base::UsageError where those shared no memory with the arguments; see [Note: views].
  void learn_views();

 private:
  bool was_told(const PendingCall& call) const;
  void add_sources(std::int64_t call, const std::function<bool(const PendingCall&)>& counts,
                   std::set<std::int64_t>& found) const;
};

inline Issued& issued(runtime::ExecutionContext& context) { return context.attached<Issued>(); }

// Throws the failure of call `id` in this thread, whose context knows of it from now on.
[[noreturn]] void tell(const base::CallId& id, const value::Failure& failure);

}  // namespace lamina::remote
