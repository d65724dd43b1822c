// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/fd.h"
#include "lamina/contact/line.h"
#include "lamina/session/admission.h"

namespace lamina::session {

// Facts that a process has in common with a job that it joins: names and texts, in an order that all have.
using Facts = std::vector<std::pair<std::string, std::string>>;

std::string to_bytes(const Facts& facts);
// Throws base::FormatError.
Facts to_facts(const std::string& bytes);
// Facts of a newcomer that comes so, and back: how it comes.
Facts of_guest(const Entrant& entrant, Facts facts);
Entrant take_entrant(Facts& facts);  // throws base::FormatError
// Names the first fact that is another one there; "" where all are alike.
std::string difference(const Facts& job, const Facts& newcomer);

// Ends the process with that exit code, whoever made it: it has left the job in order, or has none to join.
struct ProcessEnds {
  int code = 0;
};

// Words from the door to a newcomer.
enum class DoorWord : char { kWait = 'w', kRefused = 'r', kOver = 'o', kPlace = 'p', kIn = 'i', kAgain = 'a' };

// A line between the door and a newcomer.
class DoorLine {
 public:
  explicit DoorLine(contact::Connection connection) : line_(std::move(connection)) {}

  int fd() const { return line_.fd(); }
  const std::string& told() const { return line_.told(); }

  // Never blocks; false where the other end has gone, or takes nothing any more.
  bool say(DoorWord word, const std::string& text = "");
  bool knock();  // a byte that says that this end is alive
  // Takes such bytes: how many, none where the other end has gone.
  std::optional<std::size_t> hear_knocks();
  // The next word, if it has come whole. Throws base::PeerError at the end of the line, and where it was changed.
  std::optional<std::pair<DoorWord, std::string>> hear();

 private:
  contact::Line line_;
};

}  // namespace lamina::session
