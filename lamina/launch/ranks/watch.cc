// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/watch.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/error.h"

namespace lamina::launch {
namespace {

bool ignored(int signal) {
  struct sigaction action{};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

}  // namespace

void Watch::add(int fd, short events, std::function<void()> ready) {
  descriptors_.push_back({.fd = fd, .events = events, .revents = 0});
  ready_.push_back(std::move(ready));
}

void Watch::until(const std::optional<base::Deadline>& deadline) {
  if (deadline && (!deadline_ || deadline->at() < deadline_->at())) deadline_ = deadline;
}

void Watch::wait() {
  using std::chrono::milliseconds;
  int limit_ms = -1;
  if (deadline_) {
    const auto left = std::chrono::ceil<milliseconds>(deadline_->at() - base::Clock::now());
    limit_ms = static_cast<int>(std::clamp(left, milliseconds{0}, milliseconds{1000000000}).count());
  }
  if (::poll(descriptors_.data(), descriptors_.size(), limit_ms) <= 0) return;
  for (std::size_t i = 0; i < descriptors_.size(); ++i) {
    if (descriptors_[i].revents != 0) ready_[i]();
  }
}

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
