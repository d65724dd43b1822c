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

// [Note: order of calls] The calls that one context makes of one module run in the order in which they were made,
// whichever arguments arrive first. A module may keep state, and sums of gradients depend on their order. The same is
// true of their backwards, and of the calls that they make themselves. A CallOrder has the number of the latest call of
// each module, and of the latest backward.
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

  // A context ends in two parts. held() gives the references that the program still keeps outside of `results`: they
  // are to have their values before the step ends. settle() fetches these values, then waits until all that the
  // context's calls have set off is over. It throws the first failure that the context's code has not seen yet, by its
  // own call or by another one of the same cause.
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
