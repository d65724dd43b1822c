// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <string>
#include <string_view>

#include "lamina/base/deadline.h"
#include "lamina/base/fd.h"
#include "lamina/base/ids.h"
#include "lamina/launch/ranks/rank_log.h"
#include "lamina/launch/ranks/terminal.h"
#include "lamina/launch/ranks/watch.h"

namespace lamina::launch {

// The pipes that ranks write to. Output goes into the ranks' logs as it is. With --tee it is also shown, line by line,
// each behind "[rank] ", and lines of different ranks never mix. Ranks wait for us only where --tee is not read.
class RankPipes {
 public:
  RankPipes(Terminal& terminal, bool tee) : terminal_(terminal), tee_(tee) {}

  bool tee() const { return tee_; }

  // The end of a pipe for a rank to write to. With --tee its lines go to stdout or stderr as `fd` says. `log` may be
  // none. Throws StartError.
  base::Fd add(base::Rank rank, int fd, RankLog* log);

  void watch(Watch& watch);

  // Takes what the ranks have written until now; with --tee, as far as somebody reads it before the deadline.
  void flush(const base::Deadline& deadline);

  // Takes what is left, when the ranks have ended.
  void finish();

 private:
  struct Source {
    base::Fd pipe;
    std::string prefix;
    OutputQueue* queue;  // where its lines are shown, if they are
    RankLog* log;
    std::string line;  // not ended yet
  };

  static bool waits(const Source& source) { return source.queue != nullptr && source.queue->full(); }
  static bool take(Source& source);
  static void drain(Source& source, bool all);
  static void show(Source& source, std::string_view text);
  static void show_line(Source& source, std::string_view line);

  Terminal& terminal_;
  const bool tee_;
  std::deque<Source> sources_;
};

}  // namespace lamina::launch
