// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/messaging/handlers.h"
#include "lamina/messaging/wait_report.h"
#include "lamina/transport/transport.h"

namespace lamina::messaging {

inline constexpr transport::Kind kWait = "wait";  // in what the sender waits for this rank

// [Note: mutual waits] A rank waits in one operation for a rank that waits in another one for it: neither ends. This
// is found, and raised on both, long before a deadline. An *operation* is what all its members have to come to: the
// n-th value on a channel, the n-th exchange of a group, the n-th step.
//
// Whoever has waited for a moment says so to each rank that it lacks. A rank that is told of a wait, has not come to
// that operation and waits for others itself, adds its own wait and passes both on to those: a path. A path that comes
// back to the wait that it began with is a proof: each rank on it waits, in its one thread, for the next, and can do
// nothing else. (Messages of a pair of ranks keep their order: what the next had done for it before would have been
// here.) A rank that computes passes nothing on, and no wait is judged by how long it is.
//
// Then every rank of the circle gives its operation up: it withdraws what it sent for it, tells the others, waits until
// they have done so too, and throws. So the next operation is exact, if all go on in agreement. Members of such an
// operation that are not in the circle give it up when they hear of it.
//
// A rank that is told of a wait and waits itself says in turn for whom it waits. So the one that told it, and those
// that wait for that one, can name the rank at the end of such a chain. That rank has stopped or computes, and none
// between is to blame. A wait that ends well withdraws its answers. One that ends by an error leaves them: those who
// wait in turn reach their deadlines at the same time, and are to name the same rank. A rank that has done its part in
// a collective of a group says that instead, as others may still be in it.
//
// A step of a pipeline has several threads, one of which computes at a time: see [Note: compute slot]. One that keeps
// its turn while it waits, as in a collective of a team, keeps all others from computing: its wait is that of the rank.
// The thread that waits for the end of the step waits for it, too. A path is a proof only while the rank still lacks
// the next one on it, or another rank of the same operation has said that it does: what a step lacks changes.
//
// A step that was never announced keeps its number. So *attempts* at an operation are counted, alike on all ranks: who
// gives one up, or hears that another rank has, is at the next. What is heard later of an earlier one ends nothing.
class MutualWaits {
 public:
  // The one that knows a kind of operations.
  struct Keeper {
    // Says that this rank has done its part: `waiting` need not wait for it. From the thread that waits.
    std::function<bool(const WaitOperation&, base::Rank waiting)> has_come;
    // Another rank, which waited in it, has given it up. From the transport's thread.
    std::function<void(const WaitOperation&, base::Rank)> given_up;
  };

  MutualWaits(transport::Transport& transport, Handlers& handlers);

  void keep(WaitKind kind, Keeper keeper);  // before the transport starts
  // A thread that waits is none of a step's, keeps its turn in one, or has given it up.
  enum class Role { kOutside, kInTurn, kOutOfTurn };
  // How this rank learns which step has begun here, around other waits, what step of others a circle has ended, and the
  // role of the thread that asks.
  struct StepHooks {
    std::function<std::optional<WaitOperation>()> begun;
    std::function<void(const WaitOperation&)> ended;
    std::function<Role()> role;
  };
  void keep_steps(StepHooks steps);
  // Sets who is told when this rank has waited for others for a moment, and when no more. Before there are waits.
  void when_waiting(std::function<void(bool)> tell) { tell_waiting_ = std::move(tell); }

  // An operation that a rank waits in.
  struct Wait {
    WaitOperation operation = {};
    std::string what;                                // names it where the call is not known
    std::vector<base::Rank> members = {};            // who hears that it was given up
    std::function<std::vector<base::Rank>()> lacks;  // who has not come, as far as this rank knows now
    std::function<base::Call()> call = nullptr;      // the one that waits; empty: not known
    // Withdraws what was sent; may be empty. Called once, before anybody hears of it, by the thread that waits or, as
    // soon as one of the others says that it has given up, by the transport's, under a lock.
    std::function<void()> give_up = nullptr;
    // Names those who have not come, where `lacks` may give others as well; from the thread that waits.
    std::function<std::vector<base::Rank>()> absent = nullptr;
    // Says that another thread of this rank computes meanwhile.
    std::function<bool()> computes = nullptr;
    // Answers others that wait for this rank, and no more: it is in no operation, and part of no circle.
    bool only_answers = false;
  };

  // This thread waits so while it lives. A wait inside another one hides that.
  class Scope {
   public:
    Scope(MutualWaits& waits, Wait wait);
    ~Scope();
    Scope(const Scope&) = delete;

    // Called by the thread that waits again and again, without a lock. Throws base::DesyncError.
    void check();
    // The patience with that.
    base::Patience watched(const base::Patience& patience);
    // The call that waits; found out when the wait is long.
    const base::Call& call() const { return call_; }
    // The ranks for which those of `lacked` wait in this wait's operation, as far as it has heard. This one waits for
    // `lacked`, but for those that have done their part.
    Awaited awaited(const std::vector<base::Rank>& lacked) const;

   private:
    friend class MutualWaits;
    MutualWaits& waits_;
    const Wait wait_;
    const std::int64_t serial_;
    const Role role_;
    std::int64_t attempt_ = 0;  // at the operation
    Scope* outer_ = nullptr;
    const std::thread::id thread_ = std::this_thread::get_id();
    bool alone_ = false;  // in its wait: of two threads the other one may yet do what is lacked, nothing can be proven
    base::Clock::time_point since_, checked_;
    std::set<base::Rank> told_;
    std::set<base::Rank> lacked_by_others_;  // that wait in the same operation, and have told this one
    base::Call call_;
    bool withdrawn_ = false;
    std::optional<WaitPath> given_up_;          // by another rank, for this circle
    std::map<base::Rank, WaitAnswer> answers_;  // of ranks that it waits for, of their own waits
    const int exceptions_;                      // under way when it began
  };

  // Says to all ranks that this one leaves, as `words` say: "called lamina.shutdown()".
  void tell_leaving(const std::string& words);
  // The words of `rank` on it; "" when there are none.
  std::string left(base::Rank rank);

 private:
  struct Heard {
    WaitPath path;
    std::int64_t extended_in = -1;  // the wait that it was passed on from, to these:
    std::set<base::Rank> extended_to;
  };

  void receive(const transport::Message& message);  // kWait, from the transport's thread
  void check(Scope& scope);
  void tell(Scope& scope, const std::vector<base::Rank>& lacked);
  void answer(Scope& scope, const std::vector<base::Rank>& lacked);
  std::optional<WaitAnswer> answer_to(const WaitReport& told, const Scope& scope, const Awaited& awaited);
  void withdraw_answers();
  void note_waiting(bool waits);
  // Finds the circle that a path proves which has come here; else passes it on.
  std::optional<WaitPath> follow(Scope& scope, Heard& heard, const std::vector<base::Rank>& lacked);
  void end_elsewhere(const WaitPath& circle, const WaitReport& by);  // under the lock
  void withdraw(Scope& scope);                                       // under the lock
  std::int64_t attempt_at(const WaitOperation& operation) const;     // under the lock
  void count_given_up(const WaitReport& told);                       // under the lock
  [[noreturn]] void give_up(Scope& scope, const WaitPath& circle);
  void await_others(const WaitPath& circle);
  bool has_come(const WaitReport& told);
  std::optional<WaitOperation> around() const;  // the step that has begun here
  WaitReport story(Scope& scope, const std::vector<base::Rank>& lacked);
  void send(base::Rank to, value::Value body);

  transport::Transport& transport_;
  std::map<WaitKind, Keeper> keepers_;
  StepHooks steps_;
  std::atomic<std::int64_t> serials_ = 0;
  std::function<void(bool)> tell_waiting_;
  std::atomic<bool> is_waiting_ = false;

  std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  Scope* current_ = nullptr;
  std::map<std::pair<base::Rank, base::Rank>, Heard> heard_;              // by the path's first and last rank
  std::map<std::pair<WaitKind, std::string>, WaitReport> last_given_up_;  // the latest attempt of each key that was
  std::map<base::Rank, WaitReport> asking_;                               // who waits for this rank, as it said last
  std::map<base::Rank, WaitAnswer> given_;                                // to those, where it stands
  std::map<base::Rank, WaitAnswer> answers_;                              // of others, not yet taken by a scope
  std::map<base::Rank, std::int64_t> gave_up_;  // the serial of the latest wait that a rank gave up
  std::map<base::Rank, std::string> left_;
};

}  // namespace lamina::messaging
