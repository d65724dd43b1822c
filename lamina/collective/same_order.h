// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/value/failure.h"

namespace lamina::collective {

// If members start different collectives, a backend that does not check returns wrong values (equal sizes) or hangs
// (different sizes). So each member tells the next one what it starts, and before it waits compares what the previous
// one has started.
//
// [Note: collectives given up] All members give a failed pass up, once each, but not after the same collective. No
// backend ends a collective that one member has begun unless all others begin it, too. So each one that gives up says
// to all others how many collectives it has begun, and which of them it has not seen end. Who waits for one that
// another will not begin stops, with that one's error; the collective stays under way. Before a member begins anything
// else it hears what all others have begun, and begins what it lacks, for their sake: from then on all are equally far,
// and those that stayed under way end. Nothing up to there is compared any more.
//
// Used by one thread at a time.
class SameOrder {
 public:
  // A collective: a word such as "values", and numbers such as those of parameters, by which a member can begin it.
  struct Operation {
    std::string what;
    std::vector<std::int64_t> numbers;
    std::vector<std::int64_t> beside = {};  // no part of it: what the member was given before it, in hashes

    bool operator==(const Operation&) const = default;
  };
  struct Words {
    std::string who;                                        // the members, in the name of a channel: "shards"
    std::function<std::string(const Operation&)> in_words;  // "values of h.0.weight"
    std::function<base::DesyncError(const std::string& difference)> error;  // "rank 0 wants the ..., rank 1 the ..."
    // Looks at what goes along with two collectives where that differs, before these are compared; may throw. Empty:
    // nothing does.
    std::function<void(base::Rank self, const Operation& own, base::Rank other, const Operation& others)> beside = {};
  };

  // Words on the turn of the thread that calls, for a team whose collectives keep their turns; may be empty.
  struct Turn {
    std::function<void(const std::string& collective)> begins;
    std::function<void()> waits;       // for another member's word, which is to be looked out for
    std::function<void()> waits_long;  // in the last one
  };

  // `mailbox` outlives it.
  SameOrder(messaging::Mailbox& mailbox, std::vector<base::Rank> members, int member, Words words, Turn turn = {});

  // This member begins a collective. Returns its number.
  std::int64_t begin(const Operation& operation);
  // Waits until the member before has begun that many. Throws base::DesyncError where they are not what this one has
  // begun, what Words::beside and require_all_begin() throw, and what Mailbox::receive() throws.
  void check(std::int64_t number, const base::Patience& patience);
  // For a wait in that collective: ends where require_all_begin() throws, and says so where it is long.
  base::Patience watched(std::int64_t number, const base::Patience& patience);
  // This member does not begin the last one after all, for which check() has thrown.
  void take_back();
  // Throws value::RemoteFailure where another member has given up before it began that many.
  void require_all_begin(std::int64_t number);
  // Throws value::RemoteFailure where another member has given up since this one last did.
  void require_nobody_gave_up();
  // The collective has ended: all members have begun so many.
  void note_end(std::int64_t number);

  // This member gives up a pass because of this failure. Returns at once.
  void give_up(const value::Failure& failure);
  // The end of what all members do, collective: here by this failure, for which it gives up, or by none. Throws
  // value::RemoteFailure where another member has failed and this one has not, and what Mailbox::receive() throws.
  void end_together(const std::optional<value::Failure>& failure, const base::Patience& patience);
  // Waits until every member has abandoned the same passes. Returns the collectives that others have started and this
  // one has not; start them in this order.
  // Throws what Mailbox::receive() throws.
  std::vector<Operation> lacking(const base::Patience& patience);

 private:
  // A word of a member that gives up.
  struct Farewell {
    std::int64_t time;  // how-manieth
    std::int64_t begun;
    std::vector<Operation> not_ended;  // the last ones of these
    value::Failure failure;
  };
  static value::Value to_value(const Operation& operation);
  static Operation to_operation(const value::Value& value);
  static Farewell to_farewell(const value::Value& value);

  void listen();

  messaging::Mailbox& mailbox_;
  const base::Rank self_, next_, previous_;
  std::vector<base::Rank> others_;
  const Words words_;
  const Turn turn_;
  const std::string channel_, farewells_;
  std::deque<Operation> unchecked_, not_ended_;  // that this member has begun
  std::int64_t begun_ = 0, checked_ = 0;
  std::int64_t level_ = 0;                     // how many all had begun when they last began what they lacked
  std::int64_t given_up_ = 0, caught_up_ = 0;  // times
  std::map<base::Rank, std::deque<Farewell>> heard_;
};

}  // namespace lamina::collective
