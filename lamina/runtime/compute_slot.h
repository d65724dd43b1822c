// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/runtime/processor.h"
#include "lamina/schedule/team_turns.h"

namespace lamina::runtime {

// [Note: compute slot] Each microbatch, and each request that is served, has its own thread. One slot per rank passes
// between them, so exactly one computes at a time and its code reads top to bottom. A thread gives the slot up only
// while it waits for another rank; the schedule decides who gets it next. Lock order: the slot, then Python's GIL;
// nobody waits for the slot while holding the GIL. Each step has a slot of its own.
class ComputeSlot {
 public:
  // `holds_interpreter_lock` says whether this thread has the GIL, where there is one.
  ComputeSlot(schedule::TeamTurns turns, base::Clock::duration timeout,
              std::function<bool()> holds_interpreter_lock = nullptr);

  // From the next pick on.
  void follow(std::unique_ptr<schedule::Schedule> schedule);
  // Has all threads compute on one processor, from the next turn on: see [Note: processor].
  void stay_on_one_processor() { processor_.emplace(); }
  // Called by the thread that gave it up, when nobody had been waiting for it.
  void when_idle(std::function<void()> tell) { idle_ = std::move(tell); }
  // How many microbatches the step has, which the schedule goes by.
  void expect(int microbatches);

  // Where it is a team's, see [Note: turns of a team]: how words get to the other members. Called by any thread, which
  // may hold the lock of what it brings; waits for nobody.
  void when_picked(std::function<void(const schedule::Pick&)> tell) { tell_ = std::move(tell); }
  bool in_team() const { return in_team_; }
  void hear(schedule::Pick word);
  // By the thread that has it: it makes a call or begins a collective, and it waits long in one.
  void note(schedule::TurnAct act, std::string_view what);
  void note_long_wait();
  // Says that threads wait here for a word of the team's first member.
  bool awaits_pick();
  bool is_held();  // by a thread that computes, or waits in its turn
  // An error has broken off its turn, and is about to end the step: a team is not to take that for a parting.
  void break_off();
  std::optional<schedule::Parting> parting();  // of this member and the first one, once they have parted

  // From now on, and for those that wait now, acquire() throws base::CancelledError.
  void cancel();
  bool cancelled();

  // Waits until the schedule picks this thread. Throws base::CancelledError.
  void acquire(schedule::Phase phase, const schedule::TurnName& name);
  void release();

  // Takes a place in the queue for a thread that does not run yet. So places are in the order in which requests become
  // ready, not in that of their threads' starts. When the place's turn comes, the slot waits for its thread. A place
  // that is destroyed unused leaves the queue.
  class Place;
  std::shared_ptr<Place> reserve(schedule::Phase phase, const schedule::TurnName& name);
  void acquire(Place& place);  // in the thread; once

  // Takes one for work that no thread waits with, on a rank that is in no team: when its turn comes, `on_turn` is
  // called without the slot's lock, by whoever brought that about. The work has the slot until release(). Once the step
  // is cancelled, those that wait are dropped.
  void reserve(schedule::Phase phase, base::Microbatch microbatch, std::function<void()> on_turn);

  // Has microbatches that have not started wait, or not; see [Note: flags of parameters].
  void hold_starts(bool hold);

  // Gives the slot up, and waits for it behind those that wait already.
  void queue_again(schedule::Phase phase, const schedule::TurnName& name);

  // In debug builds ends the process of whoever is about to wait for the slot, or for another rank, with the GIL.
  void check_lock_order() const;

  // A microbatch has reached its first backward, or ended without one; its step body has ended.
  void forward_done();
  void finished();

 private:
  struct Waiter {
    schedule::Ticket ticket;
    schedule::TurnName name;
    bool granted = false;
    std::condition_variable wake;
    std::function<void()> on_turn;  // of work without a thread
  };

  using Lock = std::unique_lock<std::mutex>;
  void enqueue(Waiter& waiter, schedule::Phase phase, const schedule::TurnName& name);
  void wait_for_turn(Waiter& self, Lock& lock);  // unlocks
  void abandon(Waiter& waiter);
  bool hand_over();  // by the thread that has it; false: nobody takes it
  void pass_on();    // gives a free slot to the waiter that the schedule picks
  // Calls the work that has got its turn, and tells the team's other members. The lock is held before and after, not
  // meanwhile.
  void tell(Lock& lock);
  template <class Act>
  void act(const Act& what);  // under the lock, then tells

  schedule::TeamTurns turns_;
  const bool in_team_;
  std::function<void(const schedule::Pick&)> tell_ = [](const schedule::Pick&) {};
  const base::Patience patience_;
  const std::function<bool()> holds_interpreter_lock_;
  std::mutex mutex_;
  std::vector<Waiter*> waiters_;
  std::list<Waiter> without_thread_;  // among them
  std::function<void()> on_turn_;     // of the one that has the slot, before it is called
  schedule::Progress progress_;
  std::optional<Processor> processor_;
  std::function<void()> idle_ = [] {};
  std::uint64_t arrivals_ = 0;
  bool held_ = false;
  bool holds_starts_ = false;
  bool cancelled_ = false;
  bool broken_off_ = false;
};

class ComputeSlot::Place {
 public:
  explicit Place(ComputeSlot& slot) : slot_(slot) {}
  ~Place() {
    if (!taken_) slot_.abandon(waiter_);
  }
  Place(const Place&) = delete;

 private:
  friend class ComputeSlot;
  ComputeSlot& slot_;
  Waiter waiter_;
  bool taken_ = false;
};

}  // namespace lamina::runtime
