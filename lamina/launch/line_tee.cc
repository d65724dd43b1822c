// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/line_tee.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "lamina/base/str.h"
#include "lamina/launch/error.h"

namespace lamina::launch {
namespace {

constexpr std::size_t kMostWaiting = 1 << 20;  // of one outlet; then the ranks wait
constexpr std::size_t kLongestLine = 1 << 16;  // a longer one is cut

bool same_file(int a, int b) {
  struct stat one{}, two{};
  return ::fstat(a, &one) == 0 && ::fstat(b, &two) == 0 && one.st_dev == two.st_dev && one.st_ino == two.st_ino;
}

bool writable(int fd, int limit_ms) {
  pollfd state{.fd = fd, .events = POLLOUT, .revents = 0};
  return ::poll(&state, 1, limit_ms) > 0;
}

}  // namespace

LineTee::LineTee()
    : outlets_{{.fd = STDOUT_FILENO}, {.fd = STDERR_FILENO}}, one_terminal_(same_file(STDOUT_FILENO, STDERR_FILENO)) {}

base::Fd LineTee::add(base::Rank rank, int terminal, int copy) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw StartError("cannot make a pipe: " + system_words());
  base::Fd reader(ends[0]), writer(ends[1]);
  ::fcntl(reader.get(), F_SETFL, O_NONBLOCK);
  Outlet* outlet = &outlets_[terminal == STDERR_FILENO && !one_terminal_ ? 1 : 0];
  sources_.push_back({std::move(reader), base::str("[", rank, "] "), outlet, copy, {}});
  return writer;
}

void LineTee::watch(Watch& watch) {
  for (Source& source : sources_) {
    if (source.pipe && source.outlet->waiting.size() < kMostWaiting) {
      watch.add(source.pipe.get(), POLLIN, [this, &source] { take(source); });
    }
  }
  for (Outlet& outlet : outlets_) {
    if (!outlet.waiting.empty()) watch.add(outlet.fd, POLLOUT, [&outlet] { drain(outlet); });
  }
}

void LineTee::flush(const base::Deadline& deadline) {
  using std::chrono::milliseconds;
  bool full = true;
  while (full && !deadline.expired()) {
    for (Source& source : sources_) {
      if (source.pipe) take(source);
    }
    full = std::ranges::any_of(outlets_, [](const Outlet& outlet) { return outlet.waiting.size() >= kMostWaiting; });
    for (Outlet& outlet : outlets_) {
      while (!outlet.waiting.empty()) {
        const auto left = std::chrono::ceil<milliseconds>(deadline.at() - base::Deadline::Clock::now());
        if (!writable(outlet.fd, static_cast<int>(std::max(left, milliseconds{0}).count()))) break;
        drain(outlet);
      }
    }
  }
}

void LineTee::take(Source& source) {
  std::array<char, 65536> bytes;
  ssize_t count = -1;  // 0 is the end
  while (source.outlet->waiting.size() < kMostWaiting &&
         (count = ::read(source.pipe.get(), bytes.data(), bytes.size())) > 0) {
    const std::string_view text(bytes.data(), static_cast<std::size_t>(count));
    if (source.copy >= 0) [[maybe_unused]]
      auto written = ::write(source.copy, text.data(), text.size());
    source.line += text;
    for (auto end = source.line.find('\n'); end != std::string::npos; end = source.line.find('\n')) {
      show(source, end + 1);
    }
    while (source.line.size() >= kLongestLine) show(source, kLongestLine);
  }
  if (count != 0) return;
  if (!source.line.empty()) show(source, source.line.size());
  source.pipe.reset();
}

void LineTee::show(Source& source, std::size_t length) {
  source.outlet->waiting += source.prefix + source.line.substr(0, length);
  if (!source.outlet->waiting.ends_with('\n')) source.outlet->waiting += '\n';
  source.line.erase(0, length);
}

bool LineTee::open() const {
  return std::ranges::any_of(sources_, [](const Source& source) { return static_cast<bool>(source.pipe); });
}

bool LineTee::waiting() const {
  return std::ranges::any_of(outlets_, [](const Outlet& outlet) { return !outlet.waiting.empty(); });
}

// What poll promises to take without blocking, and of it whole lines, where they are not longer: what others write
// there comes between lines.
void LineTee::drain(Outlet& outlet) {
  std::size_t most = std::min<std::size_t>(outlet.waiting.size(), PIPE_BUF);
  if (const auto end = outlet.waiting.rfind('\n', most - 1); end != std::string::npos) most = end + 1;
  const ssize_t count = ::write(outlet.fd, outlet.waiting.data(), most);
  if (count > 0) {
    outlet.waiting.erase(0, static_cast<std::size_t>(count));
  } else if (errno != EINTR && errno != EAGAIN) {
    outlet.waiting.clear();  // nobody reads it any more
  }
}

}  // namespace lamina::launch
