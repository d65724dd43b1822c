// SPDX-License-Identifier: Apache-2.0
// States of a context: it holds the slot, or has given it up (to wait, or for good: retired_). While it holds it,
// what moves with the slot is its own: ProcessState, flags, statistics, ordered gradients.
//
// Threads: all is touched by the context's own thread alone, but for place_. take_place() runs in the thread that
// brings what the context waits for. It holds the lock under which that wait ends, so that the waiting thread sees the
// place.
//
// Locks: none of its own. It takes the slot, and with it the state, before any code of a face takes the GIL. See
// docs/thread-model.md.
#include "lamina/runtime/execution_context.h"

#include <exception>

#include "lamina/device/copies.h"
#include "lamina/runtime/autocast.h"
#include "lamina/runtime/stream_seed.h"
#include "lamina/runtime/turn_times.h"

namespace lamina::runtime {
namespace {

thread_local ExecutionContext* this_thread = nullptr;

}  // namespace

ExecutionContext::ExecutionContext(StepContext& step, base::Microbatch microbatch, schedule::Phase begin,
                                   std::uint64_t seed)
    : ExecutionContext(step, nullptr, {.microbatch = microbatch}, begin, seed) {}

ExecutionContext::ExecutionContext(StepContext& step, ComputeSlot::Place& place, const schedule::TurnName& name,
                                   schedule::Phase begin)
    : ExecutionContext(step, &place, name, begin, stream_seed(0)) {}

ExecutionContext::ExecutionContext(StepContext& step, ComputeSlot::Place* place, const schedule::TurnName& name,
                                   schedule::Phase begin, std::uint64_t seed)
    : step_(step),
      turn_(name),
      outer_(this_thread),
      exceptions_(std::uncaught_exceptions()),
      leads_(begin == schedule::Phase::kStart),
      seed_(seed),
      phase_(begin == schedule::Phase::kBackward ? begin : schedule::Phase::kForward) {
  place ? step_.slot().acquire(*place) : step_.slot().acquire(begin, turn_);
  take_state();
  this_thread = this;
}

ExecutionContext::~ExecutionContext() {
  this_thread = outer_;
  if (std::uncaught_exceptions() > exceptions_) step_.slot().break_off();
  end_forward();
  if (leads_) step_.slot().finished();
  release();
}

ExecutionContext* ExecutionContext::current() { return this_thread; }

void ExecutionContext::end_forward() {
  if (leads_ && !std::exchange(forward_ended_, true)) step_.slot().forward_done();
}

void ExecutionContext::queue_again(schedule::Phase phase) {
  if (!holds_) return acquire(phase);
  leave_state();
  ++turn_.turn;
  step_.slot().queue_again(phase, turn_);
  take_state();
}

// The place is taken first: what was put off earlier comes earlier. A wait in between, as of a send, is not to take it.
void ExecutionContext::leave(schedule::Phase phase) {
  phase_ = phase;
  auto next = turn_;
  ++next.turn;
  place_ = step_.slot().reserve(phase, next);
  retire();
}

void ExecutionContext::go_on() {
  retired_ = false;
  acquire(phase_);
}

void ExecutionContext::note(schedule::TurnAct act, std::string_view what) {
  if (!step_.slot().in_team() || !holds_) return;
  step_.slot().note(act, name_.empty() ? std::string(what) : base::str(what, " in ", name_));
}

const ParameterFlags::Flags& ExecutionContext::flags() {
  if (holds_ && step_.flags) flags_ = step_.flags->read(flags_);
  return flags_;
}

void ExecutionContext::set_flags(ParameterFlags::Flags flags) {
  flags_ = std::move(flags);
  if (step_.flags) step_.flags->install(flags_);
}

void ExecutionContext::end_body() {
  if (!step_.flags) return;
  step_.flags->end_body(microbatch(), flags());
  step_.slot().hold_starts(false);
}

void ExecutionContext::retire() {
  release();
  retired_ = true;
}

void ExecutionContext::take_place() {
  if (!retired_) place_ = step_.slot().reserve(phase(), turn_);
}

void ExecutionContext::acquire(schedule::Phase phase) {
  if (retired_) return;
  const auto place = std::exchange(place_, nullptr);
  place ? step_.slot().acquire(*place) : step_.slot().acquire(phase, turn_);
  take_state();
}

void ExecutionContext::release() {
  // Code that swallows the end of its step may come here again without the slot, which is then another's.
  if (!holds_) return;
  leave_state();
  ++turn_.turn;
  step_.slot().release();
}

void ExecutionContext::take_state() {
  devices::join_arrivals();
  if (!state_) {
    state_ = ProcessState::current();
    state_->seed(seed_);
    if (leads_ && step_.flags) flags_ = step_.flags->begin_body(microbatch());
  }
  if (step_.flags) step_.flags->install(flags_);
  state_->swap();
  had_weights_ = had_weights_ || phase_ == schedule::Phase::kWeights;
  if (step_.gradients) step_.gradients->turn_of(microbatch(), had_weights_);
  step_.statistics.turn_of(microbatch());
  holds_ = true;
  turn_phase_ = phase();
  begin_turn();
}

void ExecutionContext::leave_state() {
  if (leads_ && step_.flags && step_.flags->keeps_others(microbatch(), flags())) step_.slot().hold_starts(true);
  flags();
  holds_ = false;
  forget_casts();
  state_->swap();
  record_turn();
}

std::string ExecutionContext::go_on_as(std::string name) {
  if (holds_) {
    record_turn();
    begin_turn();
  }
  return std::exchange(name_, std::move(name));
}

void ExecutionContext::begin_turn() {
  turn_began_.reset();
  if (recorder() != nullptr) turn_began_.emplace();
}

void ExecutionContext::record_turn() const {
  auto* const recorder = this->recorder();
  if (recorder == nullptr || !turn_began_) return;
  record(*recorder,
         {.what = observe::what_of(schedule::kind_of(turn_phase_)),
          .step = step_.number().value,
          .microbatch = microbatch().value,
          .name = name_},
         *turn_began_, devices::Moment());
  record_memory(*recorder);
}

}  // namespace lamina::runtime
