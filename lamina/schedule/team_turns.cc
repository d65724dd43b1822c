// SPDX-License-Identifier: Apache-2.0
#include "lamina/schedule/team_turns.h"

#include <algorithm>
#include <utility>

#include "lamina/base/hash.h"
#include "lamina/base/str.h"

namespace lamina::schedule {
namespace {

std::string in_words(const TurnDigest& digest) {
  if (digest.acts == 0) return "made no call and no collective";
  return base::str("made ", digest.acts,
                   digest.acts == 1 ? " call or collective, " : " calls or collectives, the last ", digest.last);
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const TurnName& name) {
  out << "turn " << name.turn << " of ";
  if (name.call < 0) {
    out << "the step body";
  } else {
    out << "call " << name.call << " of partition " << name.caller;
  }
  return out << " (microbatch " << name.microbatch << ")";
}

void TurnDigest::note(TurnAct act, std::string_view what) {
  ++acts;
  if (act == TurnAct::kCollective) ++collectives;
  hash = base::hash64(what, hash);
  last = what;
}

std::string Parting::what() const {
  return base::str("in ", turn, " the first rank of the team ", in_words(first), ", this one ", in_words(here));
}

std::optional<std::size_t> TeamTurns::pick(std::span<const Ticket> waiting, std::span<const TurnName> names,
                                           const Progress& progress) {
  const bool ended = std::exchange(runs_, false);
  const auto chosen = schedule_ ? schedule_->pick(waiting, progress) : heed(names);
  const auto begins = chosen ? std::optional(names[*chosen]) : std::nullopt;
  if (tells_ && (begins || ended)) untold_.push_back({number_++, begins, did_});
  if (begins) {
    turn_ = begins;
    did_ = {};
    runs_ = true;
  }
  return chosen;
}

void TeamTurns::follow(std::unique_ptr<Schedule> schedule) {
  if (schedule_) schedule_ = std::move(schedule);
}

std::optional<std::size_t> TeamTurns::heed(std::span<const TurnName> names) {
  look_back();
  for (const Pick* word = next_word(); word != nullptr; word = next_word()) {
    if (word->before != did_) part(word->before);
    if (parting_) return std::nullopt;
    const auto found = word->turn ? std::ranges::find(names, *word->turn) : names.end();
    if (word->turn && found == names.end()) return std::nullopt;  // its thread comes
    heard_.erase(number_++);
    if (found != names.end()) return found - names.begin();
  }
  return std::nullopt;
}

void TeamTurns::note(TurnAct act, std::string_view what) {
  did_.note(act, what);
  look_ahead();
}

void TeamTurns::note_long_wait() {
  if (tells_) untold_.push_back({number_, turn_, did_, /*goes_on=*/true});
}

std::vector<Pick> TeamTurns::take_words() { return std::exchange(untold_, {}); }

void TeamTurns::hear(Pick word) {
  if (word.goes_on) {
    goes_on_ = std::move(word);
    return look_back();
  }
  const auto number = word.number;
  heard_.emplace(number, std::move(word));
  look_ahead();
}

std::optional<TurnName> TeamTurns::awaited() const {
  const Pick* const word = next_word();
  return word != nullptr && !runs_ ? word->turn : std::nullopt;
}

const Pick* TeamTurns::next_word() const {
  const auto found = heard_.find(number_);
  return found == heard_.end() ? nullptr : &found->second;
}

// The first member has left a turn that runs here, and begun less in it: this one may wait in what nobody else begins.
void TeamTurns::look_ahead() {
  const Pick* const word = next_word();
  if (runs_ && word != nullptr && did_.acts > word->before.acts) part(word->before);
}

// The first member waits long in a turn that has ended here, for a collective that nobody began here.
void TeamTurns::look_back() {
  const bool behind =
      !runs_ && goes_on_ && goes_on_->number == number_ && did_.collectives < goes_on_->before.collectives;
  if (behind) part(goes_on_->before);
}

void TeamTurns::part(const TurnDigest& first) {
  if (!parting_) parting_ = {turn_.value_or(TurnName()), first, did_};
}

}  // namespace lamina::schedule
