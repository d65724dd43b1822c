// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/guardian.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>

#include "lamina/base/printable.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/descendants.h"
#include "lamina/launch/ranks/error.h"
#include "lamina/launch/ranks/rank_end.h"
#include "lamina/launch/ranks/watch.h"

namespace lamina::launch {
namespace {

constexpr std::chrono::seconds kLastReapLimit{5};

[[noreturn]] void be_guardian(const std::function<int(ControlPipe&, const sigset_t&)>& body, base::Fd reader,
                              const sigset_t& mask) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_NAME, "lamina-guardian");
  // Its group is never the terminal's foreground one; ignored, these let it write there (stty tostop).
  ::signal(SIGTTOU, SIG_IGN);
  ::signal(SIGTTIN, SIG_IGN);
  int code = 1;
  try {
    ControlPipe control(std::move(reader));
    code = body(control, mask);
  } catch (const std::exception& error) {
    std::cerr << "lamina run: " << base::printable(error.what()) << '\n';
  }
  std::cerr.flush();
  ::_exit(code);
}

// Passes signals on until the guardian has ended.
void relay(Signals& signals, const base::Fd& guardian, const base::Fd& control) {
  bool ended = false;
  while (!ended) {
    Watch watch;
    watch.add(guardian.get(), POLLIN, [&] { ended = true; });
    watch.add(signals.fd(), POLLIN, [&] {
      while (const auto signal = signals.next()) {
        const auto byte = static_cast<unsigned char>(*signal);
        if (*signal != SIGCHLD) [[maybe_unused]]
          auto written = ::write(control.get(), &byte, 1);
      }
    });
    watch.wait();
  }
}

}  // namespace

ControlPipe::ControlPipe(base::Fd pipe) : pipe_(std::move(pipe)) { ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK); }

std::optional<int> ControlPipe::next() {
  unsigned char signal = 0;
  const ssize_t count = ::read(pipe_.get(), &signal, 1);
  if (count == 0) abandoned_ = true;
  return count == 1 ? std::optional<int>(signal) : std::nullopt;
}

int with_guardian(const std::function<int(ControlPipe& control, const sigset_t& mask)>& body) {
  Signals signals({SIGCHLD, SIGINT, SIGTERM, SIGHUP});
  adopt_descendants();
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw StartError("cannot make a pipe: " + base::system_error());
  base::Fd reader(ends[0]), writer(ends[1]);
  const pid_t pid = ::fork();
  if (pid < 0) throw StartError("cannot start the guardian of the ranks: " + base::system_error());
  if (pid == 0) {
    writer.reset();
    be_guardian(body, std::move(reader), signals.mask_before());
  }
  reader.reset();
  const base::Fd guardian(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!guardian) {
    const std::string why = base::system_error();
    ::kill(pid, SIGKILL);
    end_descendants(base::Deadline::after(kLastReapLimit));
    throw StartError("cannot watch the guardian of the ranks: " + why);
  }
  relay(signals, guardian, writer);
  siginfo_t info{};
  ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED);
  const RankEnd end = RankEnd::from(info);
  if (end.signal != 0) {
    std::cerr << "lamina run: the guardian of the ranks was " << end.words() << ": ending all ranks\n";
    end_descendants(base::Deadline::after(kLastReapLimit));
  }
  return end.exit_code();
}

}  // namespace lamina::launch
