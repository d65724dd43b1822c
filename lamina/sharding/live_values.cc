// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/live_values.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/outer.h"
#include "lamina/base/str.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::sharding {
namespace {

// Limits of what comes before it is needed, but always one unit.
constexpr std::size_t kMostBytesAhead = std::size_t{32} << 20, kMostUnitsAhead = 8;

// The innermost of these modules that has it.
std::string module_of(std::string name, const std::set<std::string, std::less<>>& modules) {
  do {
    name = std::string(base::outer(name));
  } while (!name.empty() && !modules.contains(name));
  return name;
}

std::string why_away(const std::string& name) {
  return base::str(name, " is sharded, and its value is away",
                   "; it comes for calls of the model: use it in the forward of a module, or call "
                   "lamina.get_full_parameter(parameter), or lamina.gathered_parameters([parameter]) around what reads "
                   "it. After lamina.shutdown() it is gone: model.state_dict() has it before");
}

}  // namespace

LiveValues::LiveValues(std::vector<ShardedParameter> parameters, std::span<const std::string> modules, Keeping keeping,
                       std::shared_ptr<Transfer> transfer)
    : transfer_(std::move(transfer)), keeping_(keeping) {
  const std::set<std::string, std::less<>> called(modules.begin(), modules.end());
  units_[""];
  for (auto& named : parameters) {
    by_tensor_[named.parameter.unsafeGetTensorImpl()] = values_.size();
    units_[module_of(named.name, called)].parameters.insert(values_.size());
    values_.push_back({named, why_away(named.name)});
  }
}

LiveValues::~LiveValues() { close(); }

void LiveValues::close() {
  std::vector<Value> gone;  // without the lock: tensors with objects of a face, which lead back to this
  const std::lock_guard lock(mutex_);
  gone.swap(values_);
  for (auto& value : gone) {
    if (!value::is_away(value.named.parameter)) value::send_away(value.named.parameter, value.why);
  }
  for (auto& [name, unit] : units_) unit = {};
  until_pass_ends_.clear();
  learned_.clear();
  kept_.clear();
  order_.clear();
  order_now_.clear();
  position_ = 0;
  live_ = 0;
  by_tensor_.clear();
  by_memory_.clear();
  transfer_.reset();
}

void LiveValues::send_away(std::size_t parameter) {
  const auto& value = values_.at(parameter);
  by_memory_[value::memory_of(value.named.parameter)] = parameter;
  value::send_away(value.named.parameter, value.why);
}

std::vector<std::string> LiveValues::units() const {
  std::vector<std::string> names;
  for (const auto& [name, unit] : units_) names.push_back(name);
  return names;
}

std::optional<std::size_t> LiveValues::find(const at::Tensor& tensor) const {
  if (const auto own = by_tensor_.find(tensor.unsafeGetTensorImpl()); own != by_tensor_.end()) return own->second;
  const auto found = by_memory_.find(value::memory_of(tensor));
  return found == by_memory_.end() ? std::nullopt : std::optional(found->second);
}

std::int64_t LiveValues::live() const {
  const std::lock_guard lock(mutex_);
  return live_;
}

std::int64_t LiveValues::most_live() const {
  const std::lock_guard lock(mutex_);
  return most_live_;
}

// Coming and going.

void LiveValues::hold(std::size_t parameter) {
  const std::lock_guard lock(mutex_);
  hold_locked(parameter);
}

void LiveValues::let_go(std::size_t parameter) {
  const std::lock_guard lock(mutex_);
  if (!transfer_) return;  // it went with the job
  let_go_locked(parameter, Until::kUpdate);
}

void LiveValues::hold_locked(std::size_t parameter) { hold_each({&parameter, 1}); }

// Every parameter, or none.
void LiveValues::hold_each(std::span<const std::size_t> wanted) {
  Held held, missing;
  std::int64_t elements = 0;
  for (const auto parameter : wanted) {
    auto& value = values_.at(parameter);
    if (value.holds == 0 && !take_kept(value)) {
      missing.push_back(parameter);
      elements += value.named.parameter.numel();
    } else {
      ++value.holds;
      held.push_back(parameter);
    }
  }
  try {
    while (!kept_.empty() && live_ + elements > keeping_.most_at_once) drop_oldest();
    if (missing.empty()) return;
    auto came = transfer_->values(missing);
    for (std::size_t i = 0; i < missing.size(); ++i) {
      come(values_[missing[i]], std::move(came[i]));
      values_[missing[i]].holds = 1;
    }
  } catch (...) {
    for (const auto parameter : held) let_go_locked(parameter, Until::kUpdate);
    throw;
  }
}

void LiveValues::come(Value& value, c10::DataPtr memory) {
  value::bring_back(value.named.parameter, std::move(memory));
  value.version = value::version_of(value.named.parameter);
  live_ += value.named.parameter.numel();
  most_live_ = std::max(most_live_, live_);
}

void LiveValues::go(Value& value) {
  value::send_away(value.named.parameter, value.why);
  live_ -= value.named.parameter.numel();
}

// One of the holds has ended with this; with an update, whatever Keeping says.
void LiveValues::let_go_locked(std::size_t parameter, Until ended) {
  auto& value = values_.at(parameter);
  if (--value.holds > 0) return;
  const bool stays = keeping_.until > ended || (ended != Until::kUpdate && is_needed_next(parameter));
  if (!stays || live_ > keeping_.most_at_once || is_written(parameter)) return go_unwritten(parameter);
  value.kept = ++times_kept_;
  kept_.emplace(value.kept, parameter);
}

bool LiveValues::is_written(std::size_t parameter) const {
  const auto& value = values_[parameter];
  const auto known = by_memory_.find(value::memory_of(value.named.parameter));
  const bool replaced = known == by_memory_.end() || known->second != parameter;  // p.data = ...
  return replaced || value::version_of(value.named.parameter) != value.version;
}

void LiveValues::go_unwritten(std::size_t parameter) {
  const bool written = is_written(parameter);
  auto& value = values_[parameter];
  go(value);
  if (!written) return;
  throw base::UsageError(base::str(value.named.name,
                                   " was written to while its whole value was here, which is not what the other ranks "
                                   "of its sharding group have: a sharded parameter is changed by its optimizer, or in "
                                   "lamina.gathered_parameters([parameter], write_back=True); sharding leaves "
                                   "parameters alone that have fewer elements than sdp_param_persistence_threshold, or "
                                   "that sdp_persistent_parameters names"),
                         base::Code{"shard-written"});
}

void LiveValues::lend(std::size_t parameter) {
  const std::lock_guard lock(mutex_);
  auto& value = values_.at(parameter);
  if (value.holds > 0) {
    throw base::UsageError(base::str(value.named.name, " is to be written to while its value is in use"),
                           base::Code{"shard-written"});
  }
  if (take_kept(value)) go(value);
  come(value, value::memory_that_keeps(transfer_->copy(parameter)));
  value.holds = 1;
}

void LiveValues::take_back(std::size_t parameter) {
  const std::lock_guard lock(mutex_);
  if (!transfer_) return;  // it went with the job
  auto& value = values_.at(parameter);
  value.holds = 0;
  go(value);
}

void LiveValues::let_go_of(const Held& held, Until ended) {
  std::exception_ptr error;
  for (const auto parameter : held) {
    try {
      let_go_locked(parameter, ended);
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

void LiveValues::end_pass() {
  const std::lock_guard lock(mutex_);
  order_ = std::exchange(order_now_, {});
  position_ = 0;
  learned_.clear();
  let_go_of(std::exchange(until_pass_ends_, {}), Until::kBackward);
  if (keeping_.until < Until::kUpdate) drop_kept();
}

void LiveValues::leave_pass() {
  const std::lock_guard lock(mutex_);
  order_now_.clear();
  position_ = 0;
  for (const auto& [unit, parameter] : std::exchange(learned_, {})) unit->parameters.erase(parameter);
  drop_all();
}

void LiveValues::before_update() {
  const std::lock_guard lock(mutex_);
  drop_all();
  if (transfer_) transfer_->expect_nothing();
  const auto held = std::ranges::find_if(values_, [](const Value& value) { return value.holds > 0; });
  if (held == values_.end()) return;
  throw base::UsageError(base::str(held->named.name,
                                   " is to change while its value is in use: call optimizer.step(), or what else "
                                   "changes parameters, outside of lamina.gathered_parameters()"),
                         base::Code{"shard-written"});
}

// With what backwards hold that are under way: they have failed.
void LiveValues::drop_all() {
  let_go_of(std::exchange(until_pass_ends_, {}), Until::kUpdate);
  for (auto& [name, unit] : units_) {
    for (const auto& held : std::exchange(unit.backwards, {})) let_go_of(held, Until::kUpdate);
  }
  drop_kept();
}

bool LiveValues::take_kept(Value& value) { return kept_.erase(std::exchange(value.kept, 0)) > 0; }

void LiveValues::drop_oldest() {
  const auto parameter = kept_.begin()->second;
  take_kept(values_[parameter]);
  go_unwritten(parameter);
}

void LiveValues::drop_kept() {
  std::exception_ptr error;
  while (!kept_.empty()) {
    try {
      drop_oldest();
    } catch (...) {
      error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

// The order of the last pass.

void LiveValues::enter(Unit& unit, bool backward) {
  order_now_.push_back({&unit, backward});
  const auto found = std::ranges::find(order_.begin() + position_, order_.end(), &unit, &Turn::unit);
  if (found != order_.end()) position_ = found - order_.begin() + 1;
}

// The next one, and those after it as long as they take little.
std::span<const LiveValues::Turn> LiveValues::next_turns() const {
  const auto next = std::span(order_).subspan(static_cast<std::size_t>(position_));
  const auto most = std::min(next.size(), kMostUnitsAhead);
  std::size_t bytes = 0;
  for (std::size_t count = 0; count < most; ++count) {
    for (const auto parameter : next[count].unit->parameters) bytes += values_[parameter].named.parameter.nbytes();
    if (bytes > kMostBytesAhead) return next.first(std::max<std::size_t>(count, 1));
  }
  return next.first(most);
}

bool LiveValues::is_needed_next(std::size_t parameter) const {
  return std::ranges::any_of(next_turns(), [&](const Turn& turn) { return turn.unit->parameters.contains(parameter); });
}

// A limit pauses this, never what is needed now. `backwards`: also of those whose backward is next.
void LiveValues::expect_next(bool backwards) {
  auto coming = live_;
  for (const auto& turn : next_turns()) {
    if (turn.backward && !backwards) return;
    Held missing;
    for (const auto parameter : turn.unit->parameters) {
      const auto& value = values_[parameter];
      if (value.holds > 0 || value.kept > 0) continue;
      coming += value.named.parameter.numel();
      missing.push_back(parameter);
    }
    if (coming > keeping_.most_at_once) return;
    if (!missing.empty()) transfer_->expect(missing);
  }
}

// Calls.

std::vector<LiveValues::Frame>& LiveValues::calls() {
  thread_local std::vector<Frame> calls;
  return calls;
}

LiveValues::Unit& LiveValues::unit_of(const model::ModuleCall& call) { return units_.at(call.name); }

void LiveValues::bring(const at::Tensor& tensor, const std::string& operation) {
  const std::lock_guard lock(mutex_);
  const auto parameter = find(tensor);
  if (!parameter || !value::is_away(values_[*parameter].named.parameter)) return;
  auto& inside = calls();
  if (!inside.empty() && inside.back().of == this) {
    hold_locked(*parameter);
    inside.back().held.push_back(*parameter);
    auto* unit = inside.back().unit;
    if (unit->parameters.insert(*parameter).second) learned_.emplace_back(unit, *parameter);
  } else if (torch::autograd::get_current_graph_task_id() >= 0) {
    hold_locked(*parameter);
    until_pass_ends_.push_back(*parameter);
  } else {
    throw base::UsageError(base::str(values_[*parameter].why, " (", operation, ")"), base::Code{"shard-away"});
  }
}

void LiveValues::before_forward(const model::ModuleCall& call) {
  const std::lock_guard lock(mutex_);
  auto& unit = unit_of(call);
  Frame frame{this, &unit, {unit.parameters.begin(), unit.parameters.end()}};
  enter(unit, /*backward=*/false);
  hold_each(frame.held);
  expect_next(keeping_.expect == Expect::kBeforeBackward);
  calls().push_back(std::move(frame));
}

void LiveValues::after_forward(const model::ModuleCall&) {
  const std::lock_guard lock(mutex_);
  const auto frame = std::move(calls().back());
  calls().pop_back();
  let_go_of(frame.held, Until::kForward);
  const bool is_outermost = calls().empty() || calls().back().of != this;
  if (keeping_.until == Until::kBackward && is_outermost && !c10::GradMode::is_enabled()) drop_kept();
}

void LiveValues::before_backward(const model::ModuleCall& call) {
  const std::lock_guard lock(mutex_);
  auto& unit = unit_of(call);
  Held held(unit.parameters.begin(), unit.parameters.end());
  enter(unit, /*backward=*/true);
  hold_each(held);
  unit.backwards.push_back(std::move(held));
  if (c10::GradMode::is_enabled()) {  // the graph that this backward makes is used later, by nodes of no unit
    for (const auto parameter : unit.backwards.back()) {
      hold_locked(parameter);
      until_pass_ends_.push_back(parameter);
    }
  }
  if (keeping_.expect == Expect::kBeforeBackward) expect_next(/*backwards=*/true);
}

void LiveValues::after_backward(const model::ModuleCall& call) {
  const std::lock_guard lock(mutex_);
  auto& unit = unit_of(call);
  if (unit.backwards.empty()) return;  // it had failed, and values have changed since
  const auto held = std::move(unit.backwards.back());
  unit.backwards.pop_back();
  let_go_of(held, Until::kBackward);
  if (keeping_.expect == Expect::kAfterBackward) expect_next(/*backwards=*/true);
}

}  // namespace lamina::sharding
