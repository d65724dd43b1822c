// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"

namespace lamina::messaging {

// An argument of a call that all members of a group make together, and its value as messages show it.
struct Argument {
  std::string name;
  std::string value;
};
inline std::string shown(bool value) { return value ? "true" : "false"; }

// Every member calls with the name and the arguments of its own call, the names of these in one order, before the call
// does anything. Returns what differs, with each value and who gave it, the same on all members; "" where nothing does.
std::string differing_arguments(Mailbox& mailbox, std::span<const base::Rank> members, const std::string& call,
                                const std::vector<Argument>& arguments, const base::Patience& patience);

}  // namespace lamina::messaging
