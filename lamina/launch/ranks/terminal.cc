// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/terminal.h"

#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace lamina::launch {
namespace {

constexpr std::size_t kFull = 1 << 20;

bool same_file(int a, int b) {
  struct stat one{}, two{};
  return ::fstat(a, &one) == 0 && ::fstat(b, &two) == 0 && one.st_dev == two.st_dev && one.st_ino == two.st_ino;
}

bool writable(int fd, const base::Deadline& deadline) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::ceil<milliseconds>(deadline.at() - base::Clock::now());
  pollfd state{.fd = fd, .events = POLLOUT, .revents = 0};
  return ::poll(&state, 1, static_cast<int>(std::max(left, milliseconds{0}).count())) > 0;
}

}  // namespace

bool OutputQueue::full() const { return waiting_.size() >= kFull; }

void OutputQueue::watch(Watch& watch) {
  if (waiting()) watch.add(fd_, POLLOUT, [this] { drain(); });
}

void OutputQueue::flush(const base::Deadline& deadline) {
  while (waiting() && writable(fd_, deadline)) drain();
}

// Writes at most PIPE_BUF bytes, which poll promises to take without blocking. These are whole lines, unless one line
// is longer, so that the output of other processes comes between lines.
void OutputQueue::drain() {
  std::size_t most = std::min<std::size_t>(waiting_.size(), PIPE_BUF);
  if (const auto end = waiting_.rfind('\n', most - 1); end != std::string::npos) most = end + 1;
  const ssize_t count = ::write(fd_, waiting_.data(), most);
  if (count > 0) {
    waiting_.erase(0, static_cast<std::size_t>(count));
  } else if (errno != EINTR && errno != EAGAIN) {
    error_ = errno;  // nobody reads it any more, or it is full
    waiting_.clear();
  }
}

Terminal::Terminal() : same_(same_file(STDOUT_FILENO, STDERR_FILENO)), out_(STDOUT_FILENO), err_(STDERR_FILENO) {}

void Terminal::watch(Watch& watch) {
  out_.watch(watch);
  err_.watch(watch);
}

void Terminal::flush(const base::Deadline& deadline) {
  out_.flush(deadline);
  err_.flush(deadline);
}

}  // namespace lamina::launch
