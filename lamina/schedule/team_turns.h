// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/schedule/schedule.h"

namespace lamina::schedule {

// A turn: the work of a microbatch's step body, or of a call, between two waits for another rank. All members of a team
// call it the same, as the caller is named by its partition, and counts its calls in turns.
struct TurnName {
  base::Microbatch microbatch;
  base::Partition caller;  // of a step body its own
  std::int64_t call = -1;  // its number among the caller's of this microbatch; -1: the step body
  std::int64_t turn = 0;   // how-manieth of this call

  friend constexpr auto operator<=>(const TurnName&, const TurnName&) = default;
  friend std::ostream& operator<<(std::ostream& out, const TurnName& name);  // "turn 2 of call 5 of partition 0 (...)"
};

// A thing that a turn does, which the members of its team compare.
enum class TurnAct : std::uint8_t { kCall, kCollective };

// The calls and collectives of a turn, as members of a team compare them.
struct TurnDigest {
  std::int64_t acts = 0;
  std::int64_t collectives = 0;  // among them
  std::uint64_t hash = 0;
  std::string last;  // "all-reduce in h.3"

  void note(TurnAct act, std::string_view what);
  friend bool operator==(const TurnDigest&, const TurnDigest&) = default;
};

// A word of a team's first member to the others.
struct Pick {
  std::int64_t number = 0;       // of its words, from 0 on: they may overtake each other
  std::optional<TurnName> turn;  // that begins; nothing: the last one has ended, and no thread may go on yet
  TurnDigest before;             // of the turn before
  bool goes_on = false;          // this is none of these: the turn before goes on, and has done so much
};

// Members have parted in a turn: they ran different code, mostly as data decided it.
struct Parting {
  TurnName turn;
  TurnDigest first, here;

  std::string what() const;  // a clause: "in turn ... the first rank of the team ..., this one ..."
};

// [Note: turns of a team] Ranks that meet in collectives while they have their slots are a team. All of them have to be
// in the same turn: else each waits for ever, in a collective of another microbatch. So the schedule decides on one of
// them, the first. It tells the others each pick, and their slots grant that turn next, and wait where its thread is
// not there yet. A turn ends at points of the program alone: at each wait for another rank, also where what it waits
// for is there. Then every member has the same turns, and nobody waits for ever (docs/decisions/schedule.md). Any
// member may be the first, in each team another one.
//
// With each pick goes what the turn before it did. The slot of a member that did something else grants nothing any
// more. Words go one way. So a first member that waits long in a collective says how far it is: a member that has ended
// this turn without the collective finds that they have parted.
//
// In one step, on one member. Its slot calls it, under its lock.
class TeamTurns {
 public:
  // On a rank that is in no team: `schedule` decides, and nobody is told.
  static TeamTurns alone(std::unique_ptr<Schedule> schedule) { return {std::move(schedule), /*tells=*/false}; }
  // On the first member, where `schedule` decides.
  static TeamTurns of_first(std::unique_ptr<Schedule> schedule) { return {std::move(schedule), /*tells=*/true}; }
  // On the others.
  static TeamTurns of_another() { return {nullptr, /*tells=*/false}; }

  bool in_team() const { return tells_ || !schedule_; }
  // From the next pick on, where a schedule decides.
  void follow(std::unique_ptr<Schedule> schedule);

  // The slot is free: its last turn has ended. The position in `waiting` of the thread that goes on, whose turns have
  // these names, or nothing when all have to wait for another event.
  std::optional<std::size_t> pick(std::span<const Ticket> waiting, std::span<const TurnName> names,
                                  const Progress& progress);
  // The turn that runs makes a call, or begins a collective.
  void note(TurnAct act, std::string_view what);

  // The turn that runs waits long for the other members.
  void note_long_wait();

  // On the first member: words to the others since the last time.
  std::vector<Pick> take_words();
  // On the others, in any order. The slot then picks if it is free.
  void hear(Pick word);

  // How this member and the first one have parted; nothing while they have not.
  const std::optional<Parting>& parting() const { return parting_; }
  // On the others: the next word is not here.
  bool awaits_word() const { return !schedule_ && next_word() == nullptr; }
  // On the others: the turn that the first one has begun, or has had, and that is not here.
  std::optional<TurnName> awaited() const;

 private:
  TeamTurns(std::unique_ptr<Schedule> schedule, bool tells) : schedule_(std::move(schedule)), tells_(tells) {}
  std::optional<std::size_t> heed(std::span<const TurnName> names);
  const Pick* next_word() const;  // nullptr while it is not here
  void look_ahead();
  void look_back();
  void part(const TurnDigest& first);

  std::unique_ptr<Schedule> schedule_;  // nullptr: another member's
  bool tells_;
  std::optional<TurnName> turn_;  // the last one that began here
  TurnDigest did_;                // in it
  bool runs_ = false;
  std::int64_t number_ = 0;             // of the next word
  std::vector<Pick> untold_;            // of the first member
  std::map<std::int64_t, Pick> heard_;  // of the others, by number
  std::optional<Pick> goes_on_;         // the last word of this kind
  std::optional<Parting> parting_;
};

}  // namespace lamina::schedule
