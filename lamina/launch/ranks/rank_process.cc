// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/rank_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <chrono>
#include <utility>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/descendants.h"
#include "lamina/launch/ranks/error.h"

namespace lamina::launch {
namespace {

std::vector<char*> pointers(const std::vector<std::string>& words) {
  std::vector<char*> result;
  result.reserve(words.size() + 1);
  for (const std::string& word : words) result.push_back(const_cast<char*>(word.c_str()));
  result.push_back(nullptr);
  return result;
}

// Between fork and exec: system calls only. Returns only if it failed.
void become(const RankStart& start, pid_t launcher, char* const* arguments, char* const* environment) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(1);  // it died before the line above could notice
  // The group is never the terminal's foreground one. Ignored, these let it write (stty tostop) and make a read of
  // /dev/tty an error; else they would stop the rank for ever.
  ::signal(SIGTTOU, SIG_IGN);
  ::signal(SIGTTIN, SIG_IGN);
  ::sigprocmask(SIG_SETMASK, &start.signal_mask, nullptr);
  if (::dup2(start.input, STDIN_FILENO) < 0 || ::dup2(start.output, STDOUT_FILENO) < 0 ||
      ::dup2(start.error, STDERR_FILENO) < 0) {
    return;
  }
  for (const int fd : start.kept) {
    if (::fcntl(fd, F_SETFD, 0) < 0) return;
  }
  ::execve(start.program.path.c_str(), arguments, environment);
}

[[noreturn]] void fail(const RankStart& start, int code) {
  throw StartError(
      base::str("cannot start rank ", start.rank, " (", start.program.path, "): ", base::system_error(code)));
}

}  // namespace

RankProcess::RankProcess(const RankStart& start) : rank_(start.rank) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) fail(start, errno);
  base::Fd reader(ends[0]), writer(ends[1]);  // closed by a successful exec; else it brings the errno
  auto arguments = pointers(start.program.arguments);
  auto environment = pointers(start.environment);
  const pid_t launcher = ::getpid();

  pid_ = ::fork();
  if (pid_ < 0) fail(start, errno);
  if (pid_ == 0) {
    become(start, launcher, arguments.data(), environment.data());
    const int code = errno;
    [[maybe_unused]] auto written = ::write(writer.get(), &code, sizeof code);
    ::_exit(kCannotStart);
  }
  writer.reset();
  pidfd_ = base::Fd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  int code = pidfd_ ? 0 : errno;
  if (code == 0 && ::read(reader.get(), &code, sizeof code) == 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  fail(start, code);
}

RankProcess::RankProcess(base::Rank rank, pid_t pid)
    : rank_(rank), pid_(pid), pidfd_(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) {
  if (!pidfd_) throw StartError(base::str("cannot watch rank ", rank, ": ", base::system_error()));
}

RankProcess& RankProcess::operator=(RankProcess&& other) noexcept {
  std::swap(rank_, other.rank_);
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  return *this;
}

RankProcess::~RankProcess() {
  siginfo_t info{};
  // Not if it was moved from, or reaped by somebody else: then its number may be another's.
  if (!pidfd_ || ::waitid(P_PIDFD, pidfd_.get(), &info, WEXITED | WNOHANG | WNOWAIT) != 0) return;
  signal_group(SIGKILL);
  pollfd ended{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  ::poll(&ended, 1, std::chrono::milliseconds(kReapLimit).count());
  ::waitpid(pid_, nullptr, WNOHANG);
}

std::optional<RankEnd> RankProcess::end() const {
  siginfo_t info{};
  if (::waitid(P_PIDFD, pidfd_.get(), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return {};
  return RankEnd::from(info);
}

void RankProcess::signal_group(int signal) const { ::kill(-pid_, signal); }

}  // namespace lamina::launch
