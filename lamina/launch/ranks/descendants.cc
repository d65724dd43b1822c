// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/descendants.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <optional>
#include <utility>

#include "lamina/base/fd.h"
#include "lamina/base/str.h"

namespace lamina::launch {
namespace {

// While it changes, the kernel's list of children may miss one, which then has not been killed and tells nothing.
constexpr std::chrono::milliseconds kLookAgain{20};
// A killed process is gone within milliseconds, unless it hangs in the kernel.
constexpr std::chrono::milliseconds kKilled{500};
constexpr pid_t kNumbers = 1 << 22;  // of processes: the kernel's own bound
// Asking for all of them, once for each generation, takes seconds where others compute, too.
constexpr std::chrono::seconds kAsking{30};

// Until a child ends, it is time to look again, or the deadline comes.
void wait_for_child(const base::Deadline& deadline) {
  using namespace std::chrono;
  const auto now = base::Clock::now();
  const auto left = std::max<nanoseconds>(deadline.slice(kLookAgain) - now, nanoseconds{0});
  const timespec limit{.tv_sec = static_cast<time_t>(duration_cast<seconds>(left).count()),
                       .tv_nsec = static_cast<long>((left % seconds{1}).count())};
  sigset_t child;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  ::sigtimedwait(&child, nullptr, &limit);
}

// The children that the kernel lists; none where it does not: without /proc, or built without this file.
std::optional<std::vector<pid_t>> listed_children() {
  std::ifstream file(base::str("/proc/self/task/", ::gettid(), "/children"));
  if (!file) return {};
  std::vector<pid_t> result;
  for (pid_t pid; file >> pid;) result.push_back(pid);
  return result;
}

bool is_there(idtype_t which, pid_t pid) {
  siginfo_t info{};
  return ::waitid(which, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

// Running or ended. Unlike the list, this is never wrong for a moment.
bool any_child() { return is_there(P_ALL, 0); }

// Children are killed together, and their ends awaited together: each takes its time.
void end_between(pid_t from, pid_t to, const base::Deadline& deadline) {
  std::vector<std::pair<pid_t, base::Fd>> killed;
  for (pid_t pid = from; pid < to; ++pid) {
    if (!is_there(P_PID, pid)) continue;
    killed.emplace_back(pid, static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    ::kill(pid, SIGKILL);
  }
  const auto gone_by = base::Deadline::after(kKilled);
  for (const auto& [pid, process] : killed) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(gone_by.at() - base::Clock::now());
    pollfd ended{.fd = process.get(), .events = POLLIN, .revents = 0};
    if (process && !deadline.expired()) ::poll(&ended, 1, static_cast<int>(std::max<std::int64_t>(left.count(), 0)));
    ::waitpid(pid, nullptr, WNOHANG);
  }
}

// Asks of every process number whether it is a child's: half a second when it has to ask for all. Children have mostly
// the numbers after ours, and their own children, ours once they are dead, come later still.
void end_unlisted(const base::Deadline& deadline) {
  constexpr pid_t kAtOnce = 1 << 12;
  const pid_t own = ::getpid();
  const auto ask = [&](pid_t from, pid_t to) {
    for (; from < to && any_child(); from += kAtOnce) end_between(from, std::min(from + kAtOnce, to), deadline);
  };
  ask(own + 1, kNumbers);
  ask(1, own);
}

}  // namespace

void adopt_descendants() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

void reap_adopted(const std::vector<pid_t>& ranks) {
  for (pid_t pid : listed_children().value_or(std::vector<pid_t>())) {
    if (std::ranges::find(ranks, pid) == ranks.end()) ::waitpid(pid, nullptr, WNOHANG);
  }
}

bool end_descendants(const base::Deadline& until, pid_t spared) {
  auto deadline = until;
  if (!listed_children()) deadline = base::Deadline::after(kAsking);
  while (any_child()) {
    if (auto listed = listed_children()) {
      // Behind a child that stays, the list misses nobody.
      if (std::erase(*listed, spared) > 0 && listed->empty()) return true;
      for (pid_t pid : *listed) ::kill(pid, SIGKILL);
    } else {
      end_unlisted(deadline);
    }
    while (::waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    if (!any_child()) return true;
    if (deadline.expired()) return false;
    wait_for_child(deadline);
  }
  return true;
}

}  // namespace lamina::launch
