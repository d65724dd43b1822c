// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <string>

#include "lamina/base/deadline.h"
#include "lamina/base/fd.h"
#include "lamina/base/ids.h"
#include "lamina/launch/terminal.h"
#include "lamina/launch/watch.h"

namespace lamina::launch {

// Shows what all ranks write, line by line, each behind "[rank] ", and copies it to their files as it is. Lines of
// different ranks never mix. When nobody reads our output, the ranks wait and we do not.
class LineTee {
 public:
  explicit LineTee(Terminal& terminal) : terminal_(terminal) {}

  // A pipe for a rank to write to, whose lines go to stdout or stderr as `fd` says, and to the file `copy` if it is
  // none of -1. Throws StartError.
  base::Fd add(base::Rank rank, int fd, int copy);

  void watch(Watch& watch);

  // Takes and shows what the ranks have written so far, as far as somebody reads it before the deadline.
  void flush(const base::Deadline& deadline);

  // Takes what is left, when the ranks have ended.
  void finish();

 private:
  struct Source {
    base::Fd pipe;
    std::string prefix;
    Outlet* outlet;
    int copy;
    std::string line;  // not ended yet
  };

  static void take(Source& source, bool all = false);
  static void show(Source& source, std::size_t length);

  Terminal& terminal_;
  std::deque<Source> sources_;
};

}  // namespace lamina::launch
