// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/reducer.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/joined.h"
#include "lamina/device/capabilities.h"
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
  return base::joined(gone);
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

GroupReduction::How how(const ReducerOptions& options, bool in_one_order) {
  return {options.bucket_bytes, options.gradients, options.travels, in_one_order};
}

}  // namespace

Reducer::Reducer(ReducerOptions options, messaging::Mailbox& mailbox, std::vector<base::Rank> replicas,
                 base::Patience patience, std::shared_ptr<value::Failures> failures, Parts parts)
    : options_(options),
      parts_(std::move(parts)),
      everyone_(first_numbers(replicas.size())),
      passes_(mailbox, std::move(replicas), std::move(patience), std::move(failures)),
      over_replicas_(how(options, parts_.in_one_order), {parts_.parameters, parts_.group}),
      alive_(std::make_shared<Reducer*>(this)),
      present_(everyone_) {
  if (parts_.scaled) scaled_.emplace(how(options, parts_.in_one_order), *parts_.scaled);
}

Reducer::~Reducer() = default;

void Reducer::set_hook(Reduce hook) {
  if (hooked()) throw base::UsageError("register_comm_hook() is called once");
  require_unsharded("register_comm_hook()");
  require_one_group("register_comm_hook()");
  each_reduction([](auto& each) { each.forget(); });
  hook_ = std::move(hook);
}

void Reducer::require_unsharded(const char* what) const {
  if (!sharded_) return;
  throw base::UsageError(base::str(what,
                                   " with sharded_data_parallel_degree: gradients of sharded parameters are those "
                                   "of all ranks, whose optimizers step together"),
                         base::Code{"shard-not-with"});
}

void Reducer::require_one_group(const char* what) const {
  if (!scaled_) return;
  throw base::UsageError(base::str(what,
                                   " with tensor_parallel_degree and batches of each rank's own, where gradients of "
                                   "slices are those of all batches of a TP_GROUP: take prescaled_batch: true"),
                         base::Code{"tp-not-with"});
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
  spec.check_others = [this, others = std::move(spec.check_others)] {
    if (others) others();
    if (sharded_) sharded_->require_nobody_failed();
  };
  told_ = hooked() || joining_ || held_back_ > 0;
  spec.tell_samples = [this](std::int64_t own) { return tell_samples(own); };
  const auto leads = std::make_shared<std::atomic<bool>>(false);
  spec.body = [leads, body = std::move(spec.body)](base::Microbatch microbatch) {
    *leads = true;
    return body(microbatch);
  };
  pipeline::StepResult result;
  std::exception_ptr error;
  try {
    result = run(std::move(spec));
    // The others wait for it, where torch's own backward came.
    if (*leads && result.backward) tell_samples(-1);
  } catch (...) {
    error = std::current_exception();
  }
  in_step_ = false;
  if (error && trains_) fail_pass(error);
  if (!trains_ && sharded_) sharded_->end_together(error ? std::optional(passes_.describe(error)) : std::nullopt);
  if (error) std::rethrow_exception(error);
  if (result.backward) {
    forget_call(step_call_);
    finish_pass();
  }
  return result;
}

void Reducer::see_batch(std::span<const at::Tensor> batch) {
  for (const auto& tensor : batch) {
    if (!looks_at_batches() || tensor.numel() == 0 || tensor.layout() != at::kStrided || tensor.is_meta()) continue;
    const auto values = devices::on_host(tensor.detach()).contiguous();
    const std::string_view bytes(static_cast<const char*>(values.data_ptr()), values.nbytes());
    const auto hash = base::hash64(bytes, static_cast<std::uint64_t>(batch_));
    batch_ = static_cast<std::int64_t>(hash | 2);  // neither of those that mean something else
  }
}

std::int64_t Reducer::note_call(bool training) {
  if (in_step_ || torch::autograd::get_current_graph_task_id() >= 0) return 0;
  fail_unseen_backward();
  return count_call(training);
}

pipeline::Copies Reducer::tell_samples(std::int64_t own) {
  if (std::exchange(told_, true)) return {1, own};
  return {static_cast<int>(everyone_.size()), passes_.add_up(own)};
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
      value::for_user([&] {  // a bucket may find its group ended by a loss
        if (note_gradient(parameter)) call_at_end_of_backward();
      });
    });
  }
  if (watch_->watch(parameters) && !first) pending_ = true;
}

void Reducer::let_go() {
  watch_.reset();
  each_reduction([](auto& each) { each.forget(); });
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
    if (!held_back) each_reduction([&](auto& each) { each.note(parameter); });
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
    for (const auto& [name, tensor] : parameters()) now.push_back(tensor);
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
  std::vector<std::int64_t> begun;
  each_reduction([&](const auto& each) { begun.push_back(each.begun()); });
  try {
    met = passes_.meet({comes, calls_left_out(), std::move(begun), /*alike=*/!joining_,
                        passes_.number() == 0 ? batch_ : Passes::kUnknownBatch});
  } catch (...) {
    leave_pass(std::current_exception());
    throw;
  }
  auto number = met.collectives.begin();
  each_reduction([&](auto& each) { each.catch_up(*number++); });
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
  each_reduction([](auto& each) { each.abandon(); });
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
  if (!stuck_) each_reduction([](auto& each) { each.close(); });
}

void Reducer::begin_pass() {
  each_reduction([](auto& each) { each.note_begun(); });
  const bool reduces = since_ + 1 >= options_.passes_per_reduction;
  if (!options_.overlap || !reduces || hooked() || joining_) return;
  each_reduction([this](auto& each) { each.arm(passes_.patience()); });
}

std::vector<NamedTensor> Reducer::parameters() const {
  auto all = over_replicas_.parameters();
  if (scaled_) std::ranges::move(scaled_->parameters(), std::back_inserter(all));
  return all;
}

std::vector<NamedTensor> Reducer::unsharded(std::vector<NamedTensor> parameters) const {
  if (sharded_) std::erase_if(parameters, [this](const auto& each) { return sharded_->has(each.tensor); });
  return parameters;
}

void Reducer::reduce(const std::vector<int>& present) {
  auto buffers = options_.broadcast_buffers ? parts_.buffers() : std::vector<NamedTensor>();
  GroupReduction::Options options{.root = present.front(),
                                  .hook = hooked() ? &hook_ : nullptr,
                                  .plans = options_.overlap && !hooked() && !joining_,
                                  .patience = passes_.patience()};
  if (!by_everyone_) options.divisor = static_cast<int>(present.size());
  each_reduction([](auto& each) { each.start_rest(); });
  each_reduction([&](auto& each) { each.reduce(unsharded(each.parameters()), std::exchange(buffers, {}), options); });
}

void Reducer::together(const std::function<void()>& compute) {
  try {
    passes_.together(compute);
  } catch (...) {
    stuck_ = stuck_ || (!may_be_left() && may_never_end(std::current_exception()));
    leave_pass(std::current_exception());
    throw;
  }
}

// Joins.

void Reducer::begin_join(bool by_everyone, bool throws) {
  require_unsharded("join()");
  require_one_group("join()");
  by_everyone_ = by_everyone;
  throws_ = throws;
  present_ = everyone_;
  joining_ = true;
  over_replicas_.forget();  // by whom sums are divided is known at the end of a pass
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
  for (auto& [name, parameter] : unsharded(parameters())) {
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
  over_replicas_.take_over(unsharded(parameters()), parts_.buffers(), root, passes_.patience());
}

}  // namespace lamina::data_parallel
