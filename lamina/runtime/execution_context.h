// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "lamina/base/ids.h"
#include "lamina/device/moment.h"
#include "lamina/runtime/process_state.h"
#include "lamina/runtime/step_context.h"

namespace lamina::runtime {

// The work of this thread: one microbatch's step body, or one request of another rank. Holds the compute slot except
// while it waits for another rank (see [Note: compute slot]). With the slot comes the process's state: each context
// has its own, and where none computes the process has that of its main thread.
class ExecutionContext {
 public:
  // Waits for the slot. Its random numbers are the stream of `seed`; its default dtype is at first the main thread's.
  // Throws base::CancelledError.
  ExecutionContext(StepContext& step, base::Microbatch microbatch, schedule::Phase begin, std::uint64_t seed = 0);
  // Takes the place that request `name` has already, in which its first turn is.
  ExecutionContext(StepContext& step, ComputeSlot::Place& place, const schedule::TurnName& name, schedule::Phase begin);
  ~ExecutionContext();
  ExecutionContext(const ExecutionContext&) = delete;

  // The context of this thread; nullptr outside any step.
  static ExecutionContext* current();

  // Says that the process's state is this thread's to change: in a context that has lost the slot it is another's.
  static bool has_process_state() { return current() == nullptr || current()->holds_; }

  StepContext& step() const { return step_; }
  base::Microbatch microbatch() const { return turn_.microbatch; }
  bool leads() const { return leads_; }                        // it is a step body, whose progress the schedule follows
  bool cancelled() const { return step_.slot().cancelled(); }  // its step has ended

  // Gives the slot up while `wait` runs, and waits for it again as a thread about to do `phase`, or in the place that
  // was taken for it.
  template <class Wait>
  auto without_slot(schedule::Phase phase, const Wait& wait) {
    step_.slot().check_lock_order();
    release();
    try {
      if constexpr (std::is_void_v<decltype(wait())>) {
        wait();
        acquire(phase);
      } else {
        auto result = wait();
        acquire(phase);
        return result;
      }
    } catch (const base::CancelledError&) {
      place_ = nullptr;
      throw;
    } catch (...) {
      if (!holds_) acquire(phase);  // the user's code may handle the error and go on
      throw;
    }
  }

  // From whichever thread brings what `wait` waits for, before that can return: a place among those that want the slot.
  // So its turn does not depend on how soon this thread wakes.
  void take_place();

  // The process has its main thread's state while `wait` runs, which another thread may do work in. The slot stays
  // here.
  template <class Wait>
  void lend_state(const Wait& wait) {
    leave_state();
    auto& flags = step_.flags;
    if (flags) flags->install(nullptr);
    const auto come_back = [&] {
      if (flags) flags->adopt();
      take_state();
    };
    try {
      wait();
    } catch (...) {
      come_back();
      throw;
    }
    come_back();
  }

  // Makes a call, or begins a collective, which the members of a team compare.
  void note(schedule::TurnAct act, std::string_view what);

  // Lets the schedule decide who goes on: this thread, about to do `phase`, or one that waits.
  void queue_again(schedule::Phase phase);

  // Enters `phase` in a turn to come: gives the slot up, with a place for it. go_on() waits for that turn.
  void leave(schedule::Phase phase);
  void go_on();

  // Once per microbatch: its forward is over. Later calls do nothing.
  void end_forward();

  // The phase in which it goes on after a wait.
  schedule::Phase phase() const { return phase_; }
  void enter(schedule::Phase phase) { phase_ = phase; }

  // Flags of parameters that its code has set, those that it was given included; see [Note: flags of parameters].
  const ParameterFlags::Flags& flags();
  void set_flags(ParameterFlags::Flags flags);  // of a request

  // The code of a step body is over.
  void end_body();

  // Gives the slot up for good: what is left to do is no computing.
  void retire();

  // State that a folder above keeps with a context, touched by its thread alone: one T, made at the first call.
  template <class T>
  T& attached() {
    if (!attached_) attached_ = std::make_shared<T>();
    return *static_cast<T*>(attached_.get());
  }

  // A word for the face of the caller, in the face's own format; it goes with the answer to a request.
  void leave_note(std::string note) { note_ = std::move(note); }
  std::string take_note() { return std::exchange(note_, {}); }

  // Where it holds the slot, what becomes of BatchNorm's running statistics; nullptr where nothing does.
  RunningStatistics* statistics() const { return holds_ ? &step_.statistics : nullptr; }

  // The recorder of its turns, nullptr for none. `name` is the module that it runs; "": a step body.
  observe::Recorder* recorder() const { return step_.recorder(); }
  void set_name(std::string name) { name_ = std::move(name); }
  // Changes the name from here on, and gives the old one. The part of this turn that is over is recorded under the old
  // name.
  std::string go_on_as(std::string name);

 private:
  ExecutionContext(StepContext& step, ComputeSlot::Place* place, const schedule::TurnName& name, schedule::Phase begin,
                   std::uint64_t seed);
  void acquire(schedule::Phase phase);
  void release();
  void take_state();
  void leave_state();
  void begin_turn();
  void record_turn() const;

  StepContext& step_;
  schedule::TurnName turn_;  // the next one, while it lacks the slot
  ExecutionContext* const outer_;
  const int exceptions_;  // under way when it began
  const bool leads_;
  const std::uint64_t seed_;
  schedule::Phase phase_;
  std::shared_ptr<ComputeSlot::Place> place_;
  ParameterFlags::Flags flags_;
  std::optional<ProcessState> state_;  // its own while it lacks the slot, else the main thread's
  bool holds_ = false;
  bool forward_ended_ = false;
  bool had_weights_ = false;  // a weight part of it has begun
  bool retired_ = false;
  std::string name_;
  std::string note_;
  std::optional<devices::Moment> turn_began_;  // none: not recorded
  schedule::Phase turn_phase_ = schedule::Phase::kForward;
  std::shared_ptr<void> attached_;
};

}  // namespace lamina::runtime
