// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lamina/membership/epoch_word.h"

namespace lamina::membership {

using Time = std::chrono::nanoseconds;  // of any clock that does not go back

// How members agree.
struct Terms {
  std::size_t least = 1;                     // members that an epoch needs
  Time patience = std::chrono::seconds(30);  // how long they may take
  Time again =
      std::chrono::milliseconds(20);  // the first waits so long, the second twice as long, before they try again
  Time answer = std::chrono::milliseconds(500);  // for the end of an epoch, until words are said again; each time twice
  Time yields = std::chrono::seconds(1);         // who is no majority without the witness asks it so much later
  std::map<MemberId, int> machines = {};         // of members; none: one of its own
};

// [Note: epochs] One process of a session whose members may be lost. An epoch ends with a loss. Then the first member
// that is not lost leads: it proposes the members of the next one. That is decided once a majority of the epoch has
// accepted it (`is_majority`). Leaders may be lost meanwhile, or several may think that they lead. So each asks before
// it proposes. A majority promises to take part in no smaller ballot, and says what it has accepted. What the greatest
// ballot had accepted is proposed in the place of the leader's own (Paxos). Thus an epoch has one successor, and a job
// goes on once or not at all. Members that are too few for a majority end, and so do those who are left out of the next
// epoch.
//
// A session ends in the same way: its members have opened another one beside it, with newcomers, without those who
// leave, or in another layout. Some may have found that one was lost meanwhile, and others not. So it is decided like
// an epoch whether the other session begins: whoever hears so goes over to it, and nobody goes on here.
//
// A member counts as lost to all who hear of it, until the next epoch. A word of somebody who is lost already does not
// count. A further loss ends the next epoch.
//
// A job may have a witness ([Note: witness] in witness.h), which is told to members as kWitness: where it is lost, and
// what it answers.
//
// It is a function of what it is told, and knows neither clocks nor connections. These are to tell of their own end.
// Words may be lost, or overtake each other: a member that has had no next epoch for a while says its own again, and a
// leader asks anew. Who calls: one thread.
class Member {
 public:
  // One of the first epoch's.
  Member(MemberId self, Epoch first, Terms terms);

  // The connection with another, or with the witness, has ended.
  void lost(MemberId other, Time now);
  // All members of that epoch have opened the next session: it begins, where no loss is decided first.
  void opened(std::int64_t epoch, Time now);
  void receive(MemberId from, const EpochWord& word, Time now);
  // Time has passed; to be called some hundred times a second while is_changing(), and else each second.
  void pass(Time now);

  // Gives what is to be sent since the last call, in this order; also words of this member to itself.
  std::vector<std::pair<MemberId, EpochWord>> take_words();

  const Epoch& epoch() const { return epoch_; }
  // True from a loss, or from the opening of the next session, until that is decided.
  bool is_changing() const { return since_.has_value(); }
  // False where there is no witness, or this member has lost it.
  bool has_witness() const { return asks_witness(); }
  // Why this member goes on no more; empty while it does.
  const std::string& ended() const { return ended_; }

 private:
  // Proposal of this one, while it leads.
  struct Proposal {
    Ballot ballot;
    std::map<MemberId, EpochWord> promises;
    std::set<MemberId> acceptances;
    std::optional<Epoch> next;
  };

  MemberId leader() const;
  bool asks_witness() const;
  bool yields(const std::set<MemberId>& here, Time now) const;
  void give_up_witness();
  void hear_giving_up(MemberId from);
  void look(Time now);
  void repeat(Time now);
  void propose();
  void answer(MemberId from, const EpochWord& word, Time now);
  void hear(MemberId from, const EpochWord& word);
  void promised(MemberId from, const EpochWord& word);
  void accepted(MemberId from, Time now);
  void refused(const Ballot& greater, Time now);
  void tell(const Epoch& next);
  void adopt(const Epoch& next, Time now);
  Epoch next_epoch() const;
  void send(MemberId to, EpochWord word);
  void send_all(const EpochWord& word);
  void send_voices(const EpochWord& word);
  void end(std::string why);

  const MemberId self_;
  const Terms terms_;
  Epoch epoch_;
  std::set<MemberId> unreachable_;  // from here

  // State of the end of this epoch.
  std::set<MemberId> lost_;
  bool has_opened_ = false;
  std::optional<Time> since_;
  std::optional<Time> answer_;  // how long words may be without one, and until when
  Time answer_by_{};
  Acceptor acceptor_;
  Ballot greatest_;
  std::set<MemberId> without_witness_;  // who have given it up
  std::optional<Proposal> proposal_;
  std::optional<Time> again_;
  std::optional<std::pair<MemberId, EpochWord>> told_;  // the last word to a leader

  std::vector<std::pair<MemberId, EpochWord>> early_;  // words about a later epoch
  std::vector<std::pair<MemberId, EpochWord>> outgoing_;
  std::string ended_;
};

}  // namespace lamina::membership
