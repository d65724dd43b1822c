// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <span>
#include <string>

#include "lamina/messaging/mailbox.h"
#include "lamina/observe/recorder.h"

namespace lamina::session {

// The clock that times a rank's events. Ranks whose clocks have the same name share it.
struct Clock {
  std::string name;
  std::function<std::int64_t()> now_ns;
};

Clock clock_of_this_machine();

// Collective over `members`: the first one gets what all of them have recorded, completed; the others what they gave.
// How far a clock is ahead is measured to half the time that a message takes there and back.
observe::Timeline gather(observe::Timeline mine, base::Rank self, std::span<const base::Rank> members,
                         messaging::Mailbox& mailbox, const base::Patience& patience,
                         const Clock& clock = clock_of_this_machine());

class Session;

// Begins a recording that write_timeline() is to write into the file `path`; collective over the world. Throws
// FileError on every rank where the first one could not write it.
void start_timeline(Session& session, const std::string& path);

// Ends what start_timeline() began and writes the file; collective over the world. The first rank writes, and
// gets a summary as text; the others get "". Throws base::Error when the file cannot be written.
std::string write_timeline(Session& session, const std::string& path);

}  // namespace lamina::session
