// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <vector>

#include "lamina/base/fd.h"
#include "lamina/base/ids.h"
#include "lamina/launch/options/program.h"
#include "lamina/launch/options/variables.h"
#include "lamina/launch/ranks/rank_end.h"

namespace lamina::launch {

// Everything that a rank begins with. The descriptors stay the caller's.
struct RankStart {
  base::Rank rank;
  const Program& program;
  Variables environment;
  int input;              // becomes its stdin
  int output;             // becomes its stdout
  int error;              // becomes its stderr
  std::vector<int> kept;  // stay open in it under the same numbers
  const sigset_t& signal_mask;
};

// One rank: the leader of a process group of its own, killed by the kernel when the thread that started it dies.
// Its zombie is kept until this object goes, so that its number, which is also the group's, names nobody else.
class RankProcess {
 public:
  // Returns when the program has begun. To be called from the main thread. Throws StartError.
  explicit RankProcess(const RankStart& start);

  // One that somebody else has started as that, and has become a child of this process. Throws StartError.
  RankProcess(base::Rank rank, pid_t pid);

  RankProcess(RankProcess&&) = default;
  RankProcess& operator=(RankProcess&& other) noexcept;  // which has this one then, and ends it
  ~RankProcess();  // kills what is left of the group; waits at most 2 s for the rank to be gone

  base::Rank rank() const { return rank_; }
  pid_t pid() const { return pid_; }
  int fd() const { return pidfd_.get(); }  // readable once the rank has ended

  // How the rank ended, or nothing while it runs. Never blocks.
  std::optional<RankEnd> end() const;

  // To every process of the group that is left.
  void signal_group(int signal) const;

 private:
  base::Rank rank_;
  pid_t pid_ = -1;
  base::Fd pidfd_;
};

}  // namespace lamina::launch
