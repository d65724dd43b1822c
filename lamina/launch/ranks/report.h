// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/launch/options/rank_environment.h"
#include "lamina/launch/ranks/rank_end.h"
#include "lamina/launch/ranks/rank_outputs.h"
#include "lamina/launch/ranks/rank_pipes.h"
#include "lamina/launch/ranks/terminal.h"

namespace lamina::launch {

// Lines of the launcher on stderr. Each line begins with "lamina run: " and is written whole; what
// nobody reads soon waits in the terminal's queue.
class Report {
 public:
  using Places = std::vector<std::pair<base::Rank, std::string>>;  // where each rank is, in rising order

  // While ranks run, there are `pipes`: flushed before anything is said of a rank, for its last words may be in them.
  Report(Terminal& terminal, RankOutputs& outputs, RankPipes* pipes, bool verbose)
      : terminal_(terminal), outputs_(outputs), pipes_(pipes), verbose_(verbose) {}

  void warn(const std::string& line) const;

  // When all is well, only if --verbose.
  void started(const Job& job, const std::string& program) const;
  void started(base::Rank rank, pid_t pid) const;
  void ended(base::Rank rank, const RankEnd& end) const;

  void lost(base::Rank rank, const RankEnd& end, int left) const;            // others go on without it
  void silent(base::Rank rank) const;                                        // it is killed, as others go on without it
  void stuck(base::Rank rank, const std::string& where) const;               // and is ended
  void stack(base::Rank rank) const;                                         // which it has written since
  void left_in_order(base::Rank rank, int left) const;                       // and others go on without it
  void coming_back(base::Rank rank, std::chrono::milliseconds pause) const;  // it is started again
  void given_up(base::Rank rank, const std::string& why) const;              // it is not
  void not_joined(base::Rank rank, const RankEnd& end, bool first) const;  // it has failed before it joined the others
  void may_be_joined(const std::string& doorkeeper) const;                 // others may join, who ask there

  // A failure.
  // The first line, which names those that `left` before, then the tail of that rank's log, or what it told instead of
  // writing it to our terminal.
  void failed(const RootCause::Failure& failure, const std::vector<base::Rank>& left, const std::string& told) const;
  void ended_with_it(int others) const;                                                  // how many others followed
  void interrupted(int signal, int ranks) const;                                         // by a signal to the launcher
  void killing(const std::vector<base::Rank>& ranks, std::chrono::seconds grace) const;  // they ignored SIGTERM
  void left(const std::vector<base::Rank>& ranks) const;                                 // not even SIGKILL ended them
  void keep_logs() const;         // gives them names, and says where
  void unshown(int error) const;  // of what --tee shows
  void lost_output();             // once, where what ranks write cannot be kept whole

  // No progress.
  void awaited(base::Rank rank, base::Rank by) const;  // who has ended is waited for in init
  void stopped(base::Rank rank, pid_t pid) const;
  void hung(const std::string& why, const Places& places);  // what ranks write from now on are their stacks
  void stacks() const;

  // Another start.
  void restarting(int restart, int restarts, std::chrono::milliseconds pause) const;
  void giving_up(std::chrono::seconds after) const;

 private:
  template <class... Parts>
  void say(const Parts&... parts) const;
  void write(const std::string& text) const;
  void flush() const;
  // The last lines, of which those before `begin` are left out where it is among them.
  void show_tail(base::Rank rank, const char* of, int lines, std::string_view begin = "") const;

  Terminal& terminal_;
  RankOutputs& outputs_;
  RankPipes* pipes_;
  bool verbose_;
};

}  // namespace lamina::launch
