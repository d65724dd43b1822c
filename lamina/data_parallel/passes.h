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

// [Note: passes] A pass is what the replicas of a model do together once: a call of a step function with a backward in
// it or, outside of steps, an outermost backward. Passes are numbered. For each number every replica says one word to
// each other one: it has come to the pass and trains in it; it has come, but has no data any more; or its step has
// failed, with the error. Who has come waits for the words of all. A failure among them ends the pass on all, with that
// error, and the next word of each is about the next number. So a replica whose step failed, and was caught, never
// meets another pass than the others, and nobody waits for it.
//
// Once all have come they compute together. A replica that fails in that (a communication hook that raises, a rank that
// is lost) leaves the others in the middle of a collective: it says so, they leave as well, and no pass follows.
namespace lamina::data_parallel {

// The passes of one replica. For one thread.
class Passes {
 public:
  // `replicas`: the ranks that hold copies of what this rank holds, itself among them, in one order on all of them.
  Passes(messaging::Mailbox& mailbox, std::vector<base::Rank> replicas, base::Patience patience,
         std::shared_ptr<value::Failures> failures);

  // The number of the pass that comes next.
  std::int64_t number() const { return number_; }

  // The model was called in training, which a pass is to follow. Where replicas come to a pass with different numbers
  // of calls since the one before, a warning says so, once: one of them has left out a part of its loop.
  void note_call() { ++calls_; }

  // Comes to the pass; collective over the replicas. `collectives`: how many this replica had begun before it. Throws
  // value::RemoteFailure when one of them has failed, and base::PeerError, base::TimeoutError, what the patience's
  // interrupt throws.
  struct Met {
    std::vector<int> present;  // those that train in it, as indices into `replicas`: all but those that say they do not
    std::int64_t collectives;  // the largest number
  };
  Met meet(bool trains = true, std::int64_t collectives = 0);

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
  enum class Says : std::int64_t { kTrains, kHasNoData, kFailed, kBrokeOff };
  struct Word {
    std::int64_t pass;
    Says says;
    std::int64_t calls;        // of the model, since the pass before
    std::int64_t collectives;  // see meet()
    std::optional<value::Failure> failure;
  };
  static Word to_word(const value::Value& value);

  void say(Says says, std::int64_t collectives, const std::optional<value::Failure>& failure = {});
  void hear();  // the words of all on this pass
  messaging::MutualWaits::Wait as_others_hear_of_it(std::vector<base::Rank> awaited);
  void listen();  // to what has come already
  void listen_to(base::Rank rank);
  bool has_come(base::Rank rank);
  void require_unbroken(base::Rank rank);
  value::RemoteFailure ended_by(base::Rank rank, const Word& word) const;
  void break_off(const std::exception_ptr& error);
  void note_break(const value::Failure& failure);
  void end_pass();
  void warn_of_different_calls(const std::vector<int>& present);
  std::string purpose() const;

  messaging::Mailbox& mailbox_;
  const std::vector<base::Rank> replicas_;
  const base::Patience patience_;
  const std::shared_ptr<value::Failures> failures_;
  const std::string channel_;
  std::int64_t number_ = 0;
  std::int64_t calls_ = 0;
  bool warned_ = false;
  std::map<base::Rank, std::deque<Word>> words_;  // heard
  std::optional<std::string> broken_;             // why no pass follows
};

}  // namespace lamina::data_parallel
