// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/fd.h"
#include "lamina/contact/line.h"

namespace lamina::session {

// Facts that a process has in common with a job that it joins: names and texts, in an order that all have.
using Facts = std::vector<std::pair<std::string, std::string>>;

std::string to_bytes(const Facts& facts);
// Throws base::FormatError.
Facts to_facts(const std::string& bytes);
// Facts of a newcomer on that machine, and back: its machine.
Facts of_guest(int node, Facts facts);
int take_node(Facts& facts);  // throws base::FormatError
// Names the first fact that is another one there; "" where all are alike.
std::string difference(const Facts& job, const Facts& newcomer);

// The file that all processes of an elastic job have open (LAMINA_DOOR_FD): the address at which newcomers join it.
class DoorPlate {
 public:
  // The one of the environment; none where the launcher gave none.
  static std::optional<DoorPlate> of_environment();

  void write(const std::string& address) const;
  std::string read() const;                  // "": nobody has written yet
  void write_over() const { write(kOver); }  // the job lets nobody in any more
  static bool is_over(const std::string& read) { return read == kOver; }

 private:
  static constexpr const char* kOver = "over";
  explicit DoorPlate(int fd) : fd_(fd) {}
  int fd_;  // the process's
};

// Words from the door to a newcomer.
enum class DoorWord : char { kWait = 'w', kRefused = 'r', kOver = 'o', kPlace = 'p', kIn = 'i' };

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
