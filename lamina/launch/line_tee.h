// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <string>

#include "lamina/base/deadline.h"
#include "lamina/base/fd.h"
#include "lamina/base/ids.h"
#include "lamina/launch/watch.h"

namespace lamina::launch {

// Shows what all ranks write, line by line, each behind "[rank] ", and copies it to their files as it is. Lines of
// different ranks never mix. Writing never blocks: when nobody reads our output, the ranks wait and we do not.
class LineTee {
 public:
  LineTee();

  // A pipe for a rank to write to, whose lines go to `terminal` (stdout or stderr), and to the file `copy` if it is
  // none of -1.
  base::Fd add(base::Rank rank, int terminal, int copy);

  void watch(Watch& watch);

  // Takes and shows what the ranks have written so far, as far as somebody reads it before the deadline.
  void flush(const base::Deadline& deadline);

  bool open() const;     // somebody may still write
  bool waiting() const;  // something is to be read by somebody yet

 private:
  struct Outlet {
    int fd;
    std::string waiting;
  };
  struct Source {
    base::Fd pipe;
    std::string prefix;
    Outlet* outlet;
    int copy;
    std::string line;  // not ended yet
  };

  void take(Source& source);
  static void show(Source& source, std::size_t length);
  static void drain(Outlet& outlet);

  Outlet outlets_[2];
  bool one_terminal_;  // stdout and stderr are the same: one queue keeps their lines apart
  std::deque<Source> sources_;
};

}  // namespace lamina::launch
