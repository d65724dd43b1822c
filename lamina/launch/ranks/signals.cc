// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/signals.h"

#include <sys/signalfd.h>

#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/error.h"

namespace lamina::launch {
namespace {

bool ignored(int signal) {
  struct sigaction action{};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

Signals::Signals(std::initializer_list<int> signals) {
  ::signal(SIGCHLD, SIG_DFL);  // inherited as ignored, the kernel would throw the ends of children away
  sigset_t wanted;
  sigemptyset(&wanted);
  for (int signal : signals) {
    if (!ignored(signal)) sigaddset(&wanted, signal);
  }
  sigset_t blocked = wanted;
  sigaddset(&blocked, SIGPIPE);
  sigaddset(&blocked, SIGXFSZ);
  ::sigprocmask(SIG_BLOCK, &blocked, &before_);
  fd_ = base::Fd(::signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd_) throw StartError("cannot receive signals: " + base::system_error());
}

std::optional<int> Signals::next() {
  signalfd_siginfo info;
  if (::read(fd_.get(), &info, sizeof info) != sizeof info) return std::nullopt;
  return static_cast<int>(info.ssi_signo);
}

}  // namespace lamina::launch
