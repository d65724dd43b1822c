// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "lamina/messaging/mailbox.h"

namespace lamina::messaging {

// Agreement of all members of a group, each function collective over them. Messages are few and short, however many
// the members are: see [Note: meetings].

// The first member that gives something, and that; none where nobody does.
struct FirstGiven {
  base::Rank rank;
  value::Value value;
};
std::optional<FirstGiven> first_given(Mailbox& mailbox, std::span<const base::Rank> members,
                                      std::optional<value::Value> own, const base::Patience& patience);

// True where all give the same number, as the hash of a text.
bool are_alike(Mailbox& mailbox, std::span<const base::Rank> members, std::int64_t own, const base::Patience& patience);
// Does so, and gives all of them a word of the first one, which alone has to have it.
struct Led {
  bool are_alike;
  value::Value word;
};
Led hear_first(Mailbox& mailbox, std::span<const base::Rank> members, std::int64_t own, value::Value word,
               const base::Patience& patience);

// The largest number of all members at each place; base::UsageError where they give different counts.
std::vector<double> largest(Mailbox& mailbox, std::span<const base::Rank> members, std::vector<double> own,
                            const base::Patience& patience);

// Has all members act: where some fail, all throw the error of the first of these, with the rank that met it.
void act_together(Mailbox& mailbox, std::span<const base::Rank> members, const std::function<void()>& act,
                  const base::Patience& patience);

// Gives all members what the first one makes, which alone is asked; where that fails, all throw its error.
value::Value made_by_first(Mailbox& mailbox, std::span<const base::Rank> members,
                           const std::function<value::Value()>& make, const base::Patience& patience);

}  // namespace lamina::messaging
