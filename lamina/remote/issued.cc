// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/issued.h"

#include <algorithm>
#include <functional>
#include <set>

#include "lamina/base/str.h"

namespace lamina::remote {
namespace {

bool held_by_others(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const bool in_python = impl->pyobj_slot()->load_pyobj() != nullptr;  // its object counts as one holder
  const bool used_there = in_python && !impl->pyobj_slot()->has_unique_reference();
  return tensor.use_count() - (in_python ? 1 : 0) > 1 || used_there;
}

// Says that somebody holds references to `source`, `count` in all, other than those in `results`.
bool held_beside(const RemoteValue& source, long count, const Tensors& results) {
  for (const auto& tensor : results) {
    if (!tensor.defined() || value::source_of(tensor).get() != &source) continue;
    if (held_by_others(tensor)) return true;
    --count;
  }
  return count > 0;
}

bool alike(const value::Failure& a, const value::Failure& b) {
  return a.rank == b.rank && a.type == b.type && a.message == b.message && a.traceback == b.traceback;
}

}  // namespace

void tell(const base::CallId& id, const value::Failure& failure) {
  if (auto* context = runtime::ExecutionContext::current()) issued(*context).told.push_back({id.counter, failure});
  throw value::RemoteFailure(failure);
}

Issued::Held Issued::held(const Tensors& results) const {
  Held kept;
  for (const auto& reference : references) {
    auto source = reference.lock();
    if (source && held_beside(*source, source.use_count() - 1, results)) kept.push_back(std::move(source));
  }
  return kept;
}

void Issued::settle(const Held& held, OutstandingCalls& outstanding, const base::Patience& patience) const {
  const auto known = told;  // taking a reference tells of more
  for (const auto& source : held) {
    try {
      source->take();
    } catch (const value::RemoteFailure& remote) {
      const auto is_it = [&](const ToldFailure& each) { return alike(each.failure, remote.failure()); };
      if (std::ranges::none_of(known, is_it)) throw;
    }
  }
  for (const auto& pending : calls) {
    outstanding.wait_done(*pending, patience);
    if (pending->failure && !was_told(*pending)) throw value::RemoteFailure(*pending->failure);
  }
}

// Adds to `found` the number of `call` and of every call whose results it was given, by whatever way, if they `count`.
void Issued::add_sources(std::int64_t call, const std::function<bool(const PendingCall&)>& counts,
                         std::set<std::int64_t>& found) const {
  const auto is_it = [&](const auto& pending) { return pending->call->id.counter == call; };
  const auto pending = std::ranges::find_if(calls, is_it);
  if (pending == calls.end() || !counts(**pending) || !found.insert(call).second) return;
  for (const auto given : (*pending)->given) add_sources(given, counts, found);
}

// Says that the code was told of the failure of this call: by this one, or by one that failed for the same cause. It
// and the calls before it are done.
bool Issued::was_told(const PendingCall& call) const {
  const auto is_same = [&](const value::Failure& failure) { return alike(failure, *call.failure); };
  std::set<std::int64_t> causes;
  add_sources(
      call.call->id.counter, [&](const PendingCall& source) { return source.failure && is_same(*source.failure); },
      causes);
  return std::ranges::any_of(told, [&](const ToldFailure& known) {
    std::set<std::int64_t> sources;
    if (is_same(known.failure)) add_sources(known.counter, [](const PendingCall&) { return true; }, sources);
    return std::ranges::any_of(causes, [&](std::int64_t cause) { return sources.contains(cause); });
  });
}

void Issued::learn_views() {
  for (auto& [call, output_spec, shared] : std::exchange(views, {})) {
    const bool written = any_written(shared.counts);
    if (output_spec) {
      output_spec->fetches_views = written;
      call->profile->learn_output_spec(std::move(output_spec));
    } else if (written) {
      const auto text = base::str(
          "a result of ", call->name.empty() ? "the model" : call->name,
          ", which lives on another rank, is a view of its argument, and one of them was written to, which was not so "
          "after earlier calls of this kind: the other may lack it; write to a clone, or have each call waited for: "
          "set_dynamic(module) before the first step");
      throw base::UsageError(text, base::Code{"step-view"});
    }
  }
}

}  // namespace lamina::remote
