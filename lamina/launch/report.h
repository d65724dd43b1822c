// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <map>
#include <string>

#include "lamina/launch/rank_log.h"
#include "lamina/launch/verdict.h"

namespace lamina::launch {

// What the launcher says on stderr. Each line begins with "lamina run: " and is written whole.
class Report {
 public:
  // `logs` has those of the ranks whose output the user has not seen.
  explicit Report(const std::map<base::Rank, const RankLog*>& logs = {}) : logs_(logs) {}

  void warn(const std::string& line) const;

  void failed(const Verdict::Failure& failure) const;               // the first line, then the tail of that rank's log
  void ended_with_it(int others) const;                             // how many others followed
  void interrupted(int signal, int ranks) const;                    // by a signal to the launcher
  void killing(base::Rank rank, std::chrono::seconds grace) const;  // it ignored SIGTERM
  void left(base::Rank rank) const;                                 // not even SIGKILL ended it

 private:
  std::map<base::Rank, const RankLog*> logs_;
};

}  // namespace lamina::launch
