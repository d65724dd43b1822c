// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/value/failure.h"

// [Note: passes] A pass is one thing that the replicas of a model do together. It is a call of a step function with a
// backward in it, an outermost backward outside of steps, or the reduction of gradients that are left before an update.
// Passes are numbered. For each number replicas exchange what they say: one trains in the pass, is about to update, or
// has no data any more. One whose step has failed says so to each other one instead, with the error. That ends the pass
// on all, and the next word of each is about the next number. So a replica whose step failed, and was caught, never
// meets another pass than the others, and nobody waits for it.
//
// Numbers alone do not tell that a replica has left out a part of its loop: its next pass would take the place of the
// one that it lacks. So each word has what the replica did since the pass before, its updates and the calls of the
// model that no backward followed. Where they differ, the pass is an error of all, and nothing is averaged.
//
// Once all have come they compute together. A replica that fails in that (a communication hook that raises, a rank that
// is lost) leaves the others in the middle of a collective. It says so, they leave as well, and no pass follows.
namespace lamina::data_parallel {

// The passes of one replica. For one thread.
class Passes {
 public:
  // `replicas`: the ranks that hold copies of what this rank holds, itself among them, in one order on all of them.
  Passes(messaging::Mailbox& mailbox, std::vector<base::Rank> replicas, base::Patience patience,
         std::shared_ptr<value::Failures> failures);

  // The number of the pass that comes next.
  std::int64_t number() const { return number_; }

  // An optimizer updates the model, after the pass before.
  void note_update() { ++updates_; }

  static constexpr std::int64_t kUnknownBatch = 0, kSharedBatch = 1;  // 1: replicas have the same on purpose
  enum class Comes : std::int64_t { kTrains, kUpdates, kHasNoData };
  struct Coming {
    Comes comes = Comes::kTrains;
    std::int64_t left_out = 0;                   // calls of the model, since the pass before, that no backward followed
    std::vector<std::int64_t> collectives = {};  // that this replica had begun before it, in each of its groups
    bool alike = true;                           // all are to have done the same since the pass before
    std::int64_t batch = kUnknownBatch;          // that it has trained on, as a hash
  };
  // Comes to the pass; collective over the replicas. Throws value::RemoteFailure when one of them has failed,
  // base::DesyncError, on all, where they are not alike, and base::PeerError, base::TimeoutError, what the patience's
  // interrupt throws.
  struct Met {
    std::vector<int> present;               // all but those that have no data, as indices into `replicas`
    std::vector<std::int64_t> collectives;  // the largest numbers
    bool updates = false;                   // one of them is about to
  };
  Met meet(const Coming& coming);
  Met meet() { return meet(Coming()); }

  // Before the pass that comes next: the sum of these numbers, -1 where one of them is negative. Collective over the
  // replicas. Throws as meet().
  std::int64_t add_up(std::int64_t own);

  // This replica's step has failed before its pass. Returns at once.
  void fail(const std::exception_ptr& error);
  // Returns the error as other replicas are told of it.
  value::Failure describe(const std::exception_ptr& error) const {
    return failures_->describe_to_send(error, mailbox_.rank());
  }

  // Runs what all do together after meet(), and lets the others know where it throws.
  template <class Compute>
  void together(const Compute& compute) {
    try {
      compute();
    } catch (...) {
      break_off(std::current_exception());
      throw;
    }
  }

  // For waits in together(): ends them when another replica has broken off.
  base::Patience patience();

 private:
  // The end of a pass, as the replica that causes it says to each other one.
  struct Word {
    std::int64_t pass = 0;
    bool breaks_off = false;
    value::Failure failure = {};
  };
  static Word to_word(const value::Value& value);
  // Everything that replicas who stand side by side have come with.
  struct Come {
    std::string who, did;  // the first of them that has data, and all that tells of the place in its loop
    std::string other;     // another one with what it did, which is something else; "" for none
    std::vector<std::int64_t> collectives = {};
    bool updates = false;
    std::vector<int> without_data = {};
    std::vector<std::int64_t> batches = {};
    bool newcomers = false;  // wait at one of them, or one wants to leave
  };
  Come come(const Coming& coming) const;
  Come exchange(const Come& own);
  value::Value exchange(const char* what, value::Value own, const messaging::Merge& merge);
  static Come merged(Come low, const Come& high);
  static value::Value to_value(const Come& come);
  static Come to_come(const value::Value& value);

  void say(const Word& word);
  void listen();  // to what has come already
  void require_whole();
  void require_unfailed(base::Rank rank);
  void require_unbroken(base::Rank rank);
  value::RemoteFailure ended_by(base::Rank rank, const Word& word) const;
  void tell_same_batch(std::vector<std::int64_t> batches) const;
  void break_off(const std::exception_ptr& error);
  void note_break(const value::Failure& failure);
  void end_pass();
  std::string purpose() const;

  messaging::Mailbox& mailbox_;
  const std::vector<base::Rank> replicas_;
  const base::Patience patience_;
  const std::shared_ptr<value::Failures> failures_;
  const std::string channel_;  // of words
  std::int64_t number_ = 0;
  std::int64_t updates_ = 0;
  std::map<base::Rank, std::deque<Word>> words_;  // heard, and of this pass or a later one
  std::optional<std::string> broken_;             // why no pass follows
};

}  // namespace lamina::data_parallel
