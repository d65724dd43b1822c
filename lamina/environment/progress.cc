// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/progress.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>

#include "lamina/environment/rank_contract.h"

namespace lamina::environment {

namespace {

constexpr std::chrono::milliseconds kRoom{1000};

int option(int socket, int name) {
  int value = -1;
  socklen_t size = sizeof value;
  return ::getsockopt(socket, SOL_SOCKET, name, &value, &size) == 0 ? value : -1;
}

}  // namespace

// A program that a rank starts inherits the variable, but where the descriptor was there may be something else.
ProgressReporter::ProgressReporter() {
  const char* variable = std::getenv(kProgressVariable);
  const int socket = variable != nullptr ? static_cast<int>(std::strtol(variable, nullptr, 10)) : -1;
  if (option(socket, SO_DOMAIN) == AF_UNIX && option(socket, SO_TYPE) == SOCK_DGRAM) socket_ = socket;
}

void ProgressReporter::close() const {
  pollfd room{.fd = socket_, .events = POLLOUT, .revents = 0};
  if (socket_ >= 0) ::poll(&room, 1, kRoom.count());
  send(0, Progress::kClosed);
}

void ProgressReporter::send(std::int64_t step, std::int32_t inside) const {
  if (socket_ < 0) return;
  const Progress progress{.step = step, .process = ::getpid(), .inside = inside};
  ::send(socket_, &progress, sizeof progress, MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool ProgressReporter::consequence(std::string_view words) const {
  if (socket_ < 0) return false;
  const Progress progress{.process = ::getpid(), .inside = Progress::kConsequence};
  std::string datagram(reinterpret_cast<const char*>(&progress), sizeof progress);
  datagram += words.substr(words.size() - std::min(words.size(), Progress::kMostWords));
  const ssize_t sent = ::send(socket_, datagram.data(), datagram.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(datagram.size());
}

}  // namespace lamina::environment
