// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/descendants.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>

#include "lamina/base/str.h"

namespace lamina::launch {
namespace {

// While it changes, the kernel's list of children may miss one, which then has not been killed and tells nothing.
constexpr std::chrono::milliseconds kLookAgain{20};

// Until a child ends, it is time to look again, or the deadline comes.
void wait_for_child(const base::Deadline& deadline) {
  using namespace std::chrono;
  const auto now = base::Deadline::Clock::now();
  const auto left = std::max<nanoseconds>(deadline.slice(kLookAgain) - now, nanoseconds{0});
  const timespec limit{.tv_sec = static_cast<time_t>(duration_cast<seconds>(left).count()),
                       .tv_nsec = static_cast<long>((left % seconds{1}).count())};
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  ::sigtimedwait(&child, nullptr, &limit);
}

}  // namespace

void adopt_descendants() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

std::vector<pid_t> children() {
  std::ifstream file(base::str("/proc/self/task/", ::gettid(), "/children"));
  std::vector<pid_t> result;
  for (pid_t pid; file >> pid;) result.push_back(pid);
  return result;
}

void reap_adopted(const std::vector<pid_t>& ranks) {
  for (pid_t pid : children()) {
    if (std::ranges::find(ranks, pid) == ranks.end()) ::waitpid(pid, nullptr, WNOHANG);
  }
}

bool end_descendants(const base::Deadline& deadline) {
  while (true) {
    for (pid_t pid : children()) ::kill(pid, SIGKILL);
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    if (children().empty()) return true;
    if (deadline.expired()) return false;
    wait_for_child(deadline);
  }
}

}  // namespace lamina::launch
