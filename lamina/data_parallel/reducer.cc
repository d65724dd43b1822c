// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/reducer.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/data_parallel/agreement.h"
#include "lamina/data_parallel/buffers.h"
#include "lamina/runtime/rng_streams.h"

namespace lamina::data_parallel {
namespace {

std::vector<int> first_numbers(std::size_t count) {
  std::vector<int> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// Those that have run out of data.
std::string missing(const std::vector<int>& everyone, const std::vector<int>& present) {
  std::vector<int> gone;
  std::ranges::set_difference(everyone, present, std::back_inserter(gone));
  std::string names;
  for (const int replica : gone) names += base::str(names.empty() ? "" : ", ", replica);
  return names;
}

// Says that a collective which this error has ended may go on for ever. The engine's errors end one, as when the others
// have closed the group, except those that come from another replica, or when it takes too long or would never end;
// after these, an interrupt, or an error of a hook nobody knows.
bool may_never_end(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const value::RemoteFailure&) {
    return true;
  } catch (const base::TimeoutError&) {
    return true;
  } catch (const base::DesyncError&) {
    return true;
  } catch (const base::Error&) {
    return false;
  } catch (...) {
    return true;
  }
}

}  // namespace

Reducer::Reducer(ReducerOptions options, messaging::Mailbox& mailbox, std::vector<base::Rank> replicas,
                 base::Patience patience, std::shared_ptr<value::Failures> failures, Parts parts)
    : options_(options),
      parts_(std::move(parts)),
      everyone_(first_numbers(replicas.size())),
      passes_(mailbox, std::move(replicas), std::move(patience), std::move(failures)),
      buckets_(options.bucket_bytes),
      present_(everyone_) {}

void Reducer::set_hook(Reduce hook) {
  if (hooked()) throw base::UsageError("register_comm_hook() is called once");
  hook_ = std::move(hook);
}

// Passes.

void Reducer::begin_step(bool training) {
  fail_unseen_backward();
  count_call(training);
  trains_ = c10::GradMode::is_enabled();
  passed_ = false;
  in_step_ = true;
}

pipeline::StepResult Reducer::run_step(pipeline::StepSpec spec, bool training, const RunStep& run) {
  begin_step(training);
  spec.saw_backward = [this] { return passed_.load(); };
  pipeline::StepResult result;
  try {
    result = run(std::move(spec));
  } catch (...) {
    in_step_ = false;
    if (trains_) passes_.fail(std::current_exception());
    throw;
  }
  in_step_ = false;
  if (result.backward) finish_pass();
  return result;
}

void Reducer::note_call(bool training) {
  if (in_step_ || torch::autograd::get_current_graph_task_id() >= 0) return;
  fail_unseen_backward();
  count_call(training);
}

void Reducer::run_backward(const std::function<void()>& run) {
  if (in_step_) passed_ = true;
  met_ = false;
  try {
    run();
  } catch (...) {
    if (!in_step_ && !met_) {
      passed_ = awaiting_ = false;
      passes_.fail(std::current_exception());
    }
    throw;
  }
}

bool Reducer::note_backward(bool accumulated) {
  if (accumulated) passed_ = true;
  return !in_step_ && !runtime::in_step() && !awaiting_.exchange(true);
}

void Reducer::end_backward() {
  awaiting_ = false;
  if (passed_) finish_pass();
}

void Reducer::finish_pass() {
  passed_ = false;
  met_ = true;
  reduce_nth(meet(true));
}

void Reducer::count_call(bool training) {
  if (training && c10::GradMode::is_enabled()) passes_.note_call();
}

void Reducer::fail_unseen_backward() {
  passed_ = false;
  if (!awaiting_.exchange(false)) return;
  passes_.fail(std::make_exception_ptr(base::Error(
      "a backward outside of step functions failed, on this replica of the model", base::Code{"replica-backward"})));
}

std::vector<int> Reducer::meet(bool trains) {
  auto present = passes_.meet(trains);
  if (!present.empty()) present_ = present;
  if (throws_ && !present.empty() && present.size() < everyone_.size()) {
    throw base::UsageError(base::str("join: replicas [", missing(everyone_, present),
                                     "] have run out of data, and throw_on_early_termination is set"),
                           base::Code{"replica-out-of-data"});
  }
  return present;
}

// Reductions.

void Reducer::reduce_nth(const std::vector<int>& present) {
  if (++done_ % options_.passes_per_reduction == 0) together([&] { reduce(present); });
}

void Reducer::reduce(const std::vector<int>& present) {
  const auto parameters = parts_.parameters();
  const auto buffers = options_.broadcast_buffers ? parts_.buffers() : std::vector<NamedTensor>();
  const auto patience = passes_.patience();
  const collective::Terms terms{hooked() ? "reducing gradients" : "averaging gradients", patience};
  auto& all = parts_.group(patience);
  const auto any = agree(parameters, buffers, all, terms);
  const auto mean = mean_over(all, static_cast<int>((by_everyone_ ? everyone_ : present).size()), terms);
  buckets_.reduce(parameters, any, hooked() ? hook_ : mean);  // no copy: a hook may be Python's
  broadcast(buffers, all, present.front(), {"broadcasting buffers", patience});
}

void Reducer::together(const std::function<void()>& compute) {
  try {
    passes_.together(compute);
  } catch (...) {
    stuck_ = stuck_ || may_never_end(std::current_exception());
    throw;
  }
}

// Joins.

void Reducer::begin_join(bool by_everyone, bool throws) {
  by_everyone_ = by_everyone;
  throws_ = throws;
  present_ = everyone_;
}

void Reducer::fail_join(const std::exception_ptr& error) {
  passes_.fail(error);  // this replica will not answer the others
  by_everyone_ = true;
  throws_ = false;
}

void Reducer::end_join() {
  try {
    for (auto present = meet(false); !present.empty(); present = meet(false)) shadow(present);
  } catch (...) {
    fail_join(std::current_exception());
    throw;
  }
  by_everyone_ = true;
  throws_ = false;
  together([this] { take_over(present_.back()); });
}

void Reducer::shadow(const std::vector<int>& present) {
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;  // parameters and their gradients
  for (auto& [name, parameter] : parts_.parameters()) {
    kept.emplace_back(parameter, std::exchange(parameter.mutable_grad(), {}));
  }
  const auto put_back = [&] {
    for (auto& [parameter, gradient] : kept) parameter.mutable_grad() = std::move(gradient);
  };
  try {
    reduce_nth(present);
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
}

void Reducer::take_over(int root) {
  const auto parameters = parts_.parameters(), buffers = parts_.buffers();
  const collective::Terms terms{"broadcasting buffers", passes_.patience()};
  auto& all = parts_.group(terms.patience);
  agree(parameters, buffers, all, terms);
  broadcast(parameters, all, root, terms);
  broadcast(buffers, all, root, terms);
}

}  // namespace lamina::data_parallel
