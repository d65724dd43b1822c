// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/reducer.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/data_parallel/agreement.h"
#include "lamina/data_parallel/buffers.h"
#include "lamina/runtime/rng_streams.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::data_parallel {
namespace {

std::vector<int> first_numbers(std::size_t count) {
  std::vector<int> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// Replicas that have run out of data.
std::string missing(const std::vector<int>& everyone, const std::vector<int>& present) {
  std::vector<int> gone;
  std::ranges::set_difference(everyone, present, std::back_inserter(gone));
  std::string names;
  for (const int replica : gone) names += base::str(names.empty() ? "" : ", ", replica);
  return names;
}

// Says that a collective which this error has ended may go on for ever. The engine's errors end it, as when the others
// have closed the group. After an error of another replica, a wait that took too long or would never end, an interrupt,
// or an error of a hook, nobody knows.
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
      buckets_(options.bucket_bytes, options.gradients),
      early_(options.bucket_bytes, options.gradients),
      alive_(std::make_shared<Reducer*>(this)),
      present_(everyone_) {}

Reducer::~Reducer() = default;

void Reducer::set_hook(Reduce hook) {
  if (hooked()) throw base::UsageError("register_comm_hook() is called once");
  require_unsharded("register_comm_hook()");
  early_.forget();
  hook_ = std::move(hook);
}

void Reducer::require_unsharded(const char* what) const {
  if (!sharded_) return;
  throw base::UsageError(base::str(what,
                                   " with sharded_data_parallel_degree: gradients of sharded parameters are those "
                                   "of all ranks, whose optimizers step together"),
                         base::Code{"shard-not-with"});
}

// Passes.

void Reducer::begin_step(bool training) {
  fail_unseen_backward();
  step_call_ = count_call(training);
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
    if (trains_) fail_pass(std::current_exception());
    throw;
  }
  in_step_ = false;
  if (result.backward) {
    forget_call(step_call_);
    finish_pass();
  }
  return result;
}

std::int64_t Reducer::note_call(bool training) {
  if (in_step_ || torch::autograd::get_current_graph_task_id() >= 0) return 0;
  fail_unseen_backward();
  return count_call(training);
}

void Reducer::run_backward(const std::function<void()>& run) {
  if (in_step_) passed_ = true;
  met_ = false;
  try {
    run();
  } catch (...) {
    if (!in_step_ && !met_) {
      awaiting_ = false;
      forget_backward();
      fail_pass(std::current_exception());
    }
    throw;
  }
}

// Backwards.

void Reducer::watch(std::span<const at::Tensor> parameters) {
  if (parameters.empty()) return watch_.reset();
  const bool first = watch_ == nullptr;
  if (first) {
    watch_ = std::make_unique<model::GradientWatch>([this](const at::Tensor& parameter) {
      if (note_gradient(parameter)) call_at_end_of_backward();
    });
  }
  if (watch_->watch(parameters) && !first) pending_ = true;
}

void Reducer::let_go() {
  watch_.reset();
  early_.forget();
}

void Reducer::await_backward(std::int64_t call) {
  forget_call(call);
  if (call != 0) heard_ = true;
  if (call > 0) free_ = true;
  if (note_backward()) call_at_end_of_backward();
}

void Reducer::call_at_end_of_backward() {
  torch::autograd::Engine::get_default_engine().queue_callback([alive = std::weak_ptr(alive_)] {
    const auto reducer = alive.lock();
    if (reducer) value::for_user([&] { (*reducer)->end_backward(); });
  });
}

bool Reducer::note_backward() { return !in_step_ && !runtime::in_step() && !awaiting_.exchange(true); }

bool Reducer::note_gradient(const at::Tensor& parameter) {
  passed_ = true;
  const bool held_back = is_held_back();
  if (!sharded_ || !sharded_->has(parameter)) {
    if (!held_back) early_.note(parameter);
  } else if (options_.overlap && !held_back) {
    sharded_->note(parameter, passes_.number());
  } else if (std::ranges::none_of(late_, [&](const auto& other) { return other.is_same(parameter); })) {
    late_.push_back(parameter);
  }
  return note_backward();
}

void Reducer::end_backward() {
  awaiting_ = false;
  if (!passed_ && watch_) {  // parameters may have got other nodes in the forward
    std::vector<at::Tensor> now;
    for (const auto& [name, tensor] : parts_.parameters()) now.push_back(tensor);
    passed_ = watch_->watch(now);
  }
  passed_ ? finish_pass() : forget_backward();
}

void Reducer::forget_backward() { passed_ = heard_ = free_ = false; }

void Reducer::finish_pass() {
  met_ = pending_ = true;
  const bool held_back = is_held_back();
  forget_backward();
  if (held_back) {
    keeps_ = true;
    if (sharded_) sharded_->end_held_back();
    return;
  }
  reduce_nth(meet(Passes::Comes::kTrains).present, /*now=*/false);
}

std::int64_t Reducer::count_call(bool training) {
  if (!c10::GradMode::is_enabled()) return 0;
  const std::lock_guard lock(calls_mutex_);
  ++calls_;
  if (training) left_out_.insert(calls_);
  return held_back_ > 0 ? -calls_ : calls_;
}

void Reducer::forget_call(std::int64_t call) {
  const std::lock_guard lock(calls_mutex_);
  left_out_.erase(std::abs(call));
}

std::int64_t Reducer::calls_left_out() {
  const std::lock_guard lock(calls_mutex_);
  return std::ssize(std::exchange(left_out_, {}));
}

// Updates.

void Reducer::complete(const char* what) {
  const bool in_backward = torch::autograd::get_current_graph_task_id() >= 0;
  if ((passed_ || pending_) && (in_step_ || in_backward)) throw too_early(what);
  if (!in_step_) fail_unseen_backward();
  if (pending_) reduce_nth(meet(Passes::Comes::kUpdates).present, /*now=*/true);
}

void Reducer::before_update() {
  // A hook of a parameter may run before the one that notices its gradient.
  if (torch::autograd::get_current_graph_task_id() >= 0) throw too_early("optimizer.step()");
  complete("optimizer.step()");
  passes_.note_update();
}

base::UsageError Reducer::too_early(const char* what) const {
  return base::UsageError(
      base::str(what, in_step_ ? " inside a step function" : " inside a backward",
                ", whose gradients are averaged over the replicas of the model when it has ended: call it after that"),
      base::Code{"replica-update-early"});
}

void Reducer::fail_unseen_backward() {
  forget_backward();
  if (!awaiting_.exchange(false)) return;
  fail_pass(std::make_exception_ptr(base::Error(
      "a backward outside of step functions failed, on this replica of the model", base::Code{"replica-backward"})));
}

Passes::Met Reducer::meet(Passes::Comes comes) {
  Passes::Met met;
  try {
    met = passes_.meet({comes, calls_left_out(), collectives_, /*alike=*/!joining_});
  } catch (...) {
    leave_pass(std::current_exception());
    throw;
  }
  if (apart_ && collectives_ < met.collectives) apart_->resume_at(met.collectives);
  collectives_ = met.collectives;
  const auto& present = met.present;
  if (!present.empty()) present_ = present;
  if (throws_ && !present.empty() && present.size() < everyone_.size()) {
    throw base::UsageError(base::str("join: replicas [", missing(everyone_, present),
                                     "] have run out of data, and throw_on_early_termination is set"),
                           base::Code{"replica-out-of-data"});
  }
  return met;
}

// Reductions.

void Reducer::fail_pass(const std::exception_ptr& error) {
  passes_.fail(error);
  calls_left_out();
  leave_pass(error);
}

// Ends what has started early, on all replicas; the next pass is as the first.
void Reducer::leave_pass(const std::exception_ptr& error) {
  pending_ = true;  // what there is of gradients is this replica's own
  if (apart_) collectives_ = apart_->abandon();
  early_.forget();
  for (const auto& parameter : std::exchange(late_, {})) parameter.mutable_grad().reset();
  if (sharded_) sharded_->abandon(passes_.describe(error));
}

void Reducer::reduce_nth(const std::vector<int>& present, bool now) {
  const bool reduces = ++since_ >= options_.passes_per_reduction || now;
  if (reduces) together([&] { reduce(present); });
  if (sharded_) {
    together([&] {
      const auto pass = passes_.number() - 1;
      for (const auto& parameter : std::exchange(late_, {})) sharded_->note(parameter, pass);
      sharded_->reduce(pass, reduces, passes_.patience());
    });
  }
  if (reduces) {
    since_ = 0;
    pending_ = keeps_ = false;
  }
  begin_pass();
}

void Reducer::close() {
  if (stuck_) return;
  early_.forget();
  apart_.reset();
}

void Reducer::begin_pass() {
  if (!apart_) return;
  collectives_ = apart_->begun();
  const bool reduces = since_ + 1 >= options_.passes_per_reduction;
  if (!options_.overlap || !reduces || hooked() || joining_) return;
  early_.arm(*apart_, static_cast<int>(everyone_.size()), {"averaging gradients", passes_.patience()});
}

// One apart, where a replica may leave what it has started. Such a group carries tensors of the CPU alone.
collective::Group& Reducer::group(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers,
                                  const base::Patience& patience) {
  auto& shared = parts_.group(patience);
  if (!std::exchange(grouped_, true)) {
    const auto is_cpu = [](const NamedTensor& each) { return each.tensor.is_cpu(); };
    if (std::ranges::all_of(parameters, is_cpu) && std::ranges::all_of(buffers, is_cpu)) {
      apart_ = shared.apart("reduction");
    }
  }
  return apart_ ? *apart_ : shared;
}

std::vector<NamedTensor> Reducer::whole() const {
  auto parameters = parts_.parameters();
  if (sharded_) std::erase_if(parameters, [this](const auto& each) { return sharded_->has(each.tensor); });
  return parameters;
}

void Reducer::reduce(const std::vector<int>& present) {
  const auto parameters = whole();
  const auto buffers = options_.broadcast_buffers ? parts_.buffers() : std::vector<NamedTensor>();
  const auto patience = passes_.patience();
  const collective::Terms terms{hooked() ? "reducing gradients" : "averaging gradients", patience};
  auto& all = group(parameters, buffers, patience);
  early_.start_rest();
  std::vector<Gradient> mine;
  for (const auto& parameter : parameters) mine.push_back(early_.state(parameter.tensor));
  const auto agreed = agree(parameters, mine, buffers, all, terms);

  std::unordered_set<const at::TensorImpl*> sent;
  std::vector<bool> unsent;
  std::vector<at::Tensor> next;  // gradients come to the last parameters first
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (agreed[i] == Gradient::kSent) sent.insert(parameters[i].tensor.unsafeGetTensorImpl());
    unsent.push_back(agreed[i] >= Gradient::kUnsent);
    if (agreed[i] == Gradient::kSent || agreed[i] == Gradient::kUnsent) next.push_back(parameters[i].tensor);
  }
  std::ranges::reverse(next);
  early_.finish([&](const at::Tensor& parameter) { return sent.contains(parameter.unsafeGetTensorImpl()); });
  const auto mean = mean_over(all, static_cast<int>((by_everyone_ ? everyone_ : present).size()), terms);
  buckets_.reduce(parameters, unsent, hooked() ? hook_ : mean);  // no copy: a hook may be Python's
  broadcast(buffers, all, present.front(), {"broadcasting buffers", patience});
  if (apart_ && options_.overlap && !hooked() && !joining_) early_.plan(next);
}

void Reducer::together(const std::function<void()>& compute) {
  try {
    passes_.together(compute);
  } catch (...) {
    stuck_ = stuck_ || (!apart_ && may_never_end(std::current_exception()));
    leave_pass(std::current_exception());
    throw;
  }
}

// Joins.

void Reducer::begin_join(bool by_everyone, bool throws) {
  require_unsharded("join()");
  by_everyone_ = by_everyone;
  throws_ = throws;
  present_ = everyone_;
  joining_ = true;
  early_.forget();  // by whom sums are divided is known at the end of a pass
}

void Reducer::fail_join(const std::exception_ptr& error) {
  fail_pass(error);  // this replica will not answer the others
  by_everyone_ = true;
  throws_ = joining_ = false;
}

void Reducer::end_join() {
  try {
    const auto meet_others = [this] { return meet(Passes::Comes::kHasNoData); };
    for (auto met = meet_others(); !met.present.empty(); met = meet_others()) shadow(met);
  } catch (...) {
    fail_join(std::current_exception());
    throw;
  }
  by_everyone_ = true;
  throws_ = joining_ = false;
  together([this] { take_over(present_.back()); });
}

void Reducer::shadow(const Passes::Met& met) {
  std::vector<std::pair<at::Tensor, at::Tensor>> kept;  // parameters and their gradients
  for (auto& [name, parameter] : whole()) {
    auto& gradient = parameter.mutable_grad();
    const bool counts = pending_ && gradient.defined();  // no reduction has had it
    kept.emplace_back(parameter, std::exchange(gradient, counts ? gradient.clone() : at::Tensor()));
  }
  const auto put_back = [&] {
    for (auto& [parameter, gradient] : kept) parameter.mutable_grad() = std::move(gradient);
  };
  try {
    reduce_nth(met.present, met.updates);
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
}

void Reducer::take_over(int root) {
  const auto parameters = whole(), buffers = parts_.buffers();
  const collective::Terms terms{"broadcasting buffers", passes_.patience()};
  auto& all = group(parameters, buffers, terms.patience);
  agree(parameters, std::vector<Gradient>(parameters.size()), buffers, all, terms);
  broadcast(parameters, all, root, terms);
  broadcast(buffers, all, root, terms);
}

}  // namespace lamina::data_parallel
