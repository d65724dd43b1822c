// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/base/wait.h"
#include "lamina/value/value.h"

namespace lamina::messaging {

// [Note: meetings] An exchange makes one value of those of all members, in their order, the same on each. Where their
// number is a power of two, members meet in rounds: in the first each meets its neighbour, then the one two places
// away, then four. After each meeting both have the values of the same members, who stand side by side. Where it is
// not, some give theirs to a neighbour before, who meets the others for both, and gives it the result. So a member
// sends log2(n) + 1 messages at most, and two just send to each other.
//
// A member that cannot go on (another one is lost, its time is up, it is interrupted) may owe messages of later rounds.
// It sends its error in their place, and so do those who hear of it. So all who lack something end with the error of
// the one that met it.

// A meeting of two members.
struct Meeting {
  std::size_t with = 0;  // the other one's place
  bool gives = true, takes = true;
  bool ends = false;  // what it takes is the result
};
std::vector<Meeting> meetings(std::size_t member, std::size_t members);

// Everything that members who stand side by side have given.
struct Given {
  struct Caller {
    base::Rank rank;
    base::Call call;
  };

  std::string error;            // of one that cannot go on, see outcome.h; "" for none
  std::optional<Caller> first;  // the first of them whose call is known
  std::optional<Caller> other;  // the first of them in another part of a call
  value::Value value;           // nothing with an error, or two calls
};

// Makes one value of two: `low` of members who stand before those of `high`. Associative.
using Merge = std::function<value::Value(value::Value low, value::Value high)>;
Given merge(Given low, Given high, const Merge& merge);

value::Value to_value(const Given& given);
Given to_given(const value::Value& value);

}  // namespace lamina::messaging
