// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>

#include <functional>
#include <optional>

#include "lamina/base/fd.h"

namespace lamina::launch {

// [Note: guardian] The process that a user starts, the command, can be killed at any moment, and then nobody else may
// be left. So it does nothing but pass its signals on to a child, the guardian, which starts and watches the ranks.
//   - The command dies: the guardian sees the end of their pipe and kills every descendant; orphans of ranks have
//     become its children (child subreaper).
//   - The guardian dies: the kernel kills the ranks (PR_SET_PDEATHSIG), their orphans become children of the command,
//     and that kills them.
// The guardian has a process group of its own, so that Ctrl-C on a terminal reaches it once, through the command.

// The pipe through which the command tells the guardian of the signals that it got. Its end closes with the command,
// however that dies.
class ControlPipe {
 public:
  explicit ControlPipe(base::Fd pipe);

  int fd() const { return pipe_.get(); }  // readable when there is an order, or the command is gone
  std::optional<int> next();              // the next signal, or nothing; never blocks
  bool abandoned() const { return abandoned_; }

 private:
  base::Fd pipe_;
  bool abandoned_ = false;
};

// Runs `body` in a guardian and returns its exit code. `mask` is the signal mask that ranks are to begin with. To be
// called from the main thread of a process without other children. Throws StartError.
int with_guardian(const std::function<int(ControlPipe& control, const sigset_t& mask)>& body);

}  // namespace lamina::launch
