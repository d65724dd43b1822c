// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "lamina/membership/epoch.h"

namespace lamina::membership {

// A try to end an epoch; the greatest counts.
struct Ballot {
  std::int64_t round = 0;
  MemberId by = MemberId(-1);

  friend constexpr auto operator<=>(const Ballot&, const Ballot&) = default;
};

// A word of one member to another about the end of an epoch.
struct EpochWord {
  enum class Kind : std::uint8_t {
    kTells,     // who is lost: to the leader
    kAsks,      // the leader asks for promises
    kPromises,  // to take part in no smaller ballot; `next`: what was accepted, in ballot `accepted`
    kProposes,  // the leader proposes `next`
    kAccepts,
    kRefuses,  // `ballot` is greater than the one that it answers
    kDecided,  // `next` is the epoch that follows
    kWonders,  // what has become of the epoch
    kGivesUp,  // the witness: it never asks that in this epoch
  };
  Kind kind = Kind::kTells;
  std::int64_t epoch = -1;  // the number of the one that ends
  Ballot ballot = {}, accepted = {};
  std::optional<Epoch> next = {};
  std::set<MemberId> lost = {};

  std::string to_text() const;
  // Throws base::FormatError.
  static EpochWord read(const std::string& text);
  friend bool operator==(const EpochWord&, const EpochWord&) = default;
};

// A voice in what follows an epoch: it takes part in no smaller ballot than it has promised, and tells what it has
// accepted to those who ask later.
class Acceptor {
 public:
  // The answer to one that asks or proposes.
  EpochWord answer(const EpochWord& word);
  const Ballot& promised() const { return promised_; }  // Ballot(): nothing yet

 private:
  Ballot promised_, accepted_in_;
  std::optional<Epoch> accepted_;
};

}  // namespace lamina::membership
