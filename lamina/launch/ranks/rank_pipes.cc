// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/ranks/rank_pipes.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <array>

#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/error.h"

namespace lamina::launch {
namespace {

constexpr std::size_t kLongestLine = 1 << 16;  // a longer one is cut
constexpr std::size_t kPiece = 1 << 16;        // as much as a pipe holds

}  // namespace

base::Fd RankPipes::add(base::Rank rank, int fd, RankLog* log) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw StartError("cannot make a pipe: " + base::system_error());
  base::Fd reader(ends[0]), writer(ends[1]);
  ::fcntl(reader.get(), F_SETFL, O_NONBLOCK);
  OutputQueue* queue = !tee_ ? nullptr : fd == STDERR_FILENO ? &terminal_.err() : &terminal_.out();
  sources_.push_back({std::move(reader), base::str("[", rank, "] "), queue, log, {}});
  return writer;
}

void RankPipes::watch(Watch& watch) {
  for (Source& source : sources_) {
    if (source.pipe && !waits(source)) watch.add(source.pipe.get(), POLLIN, [&source] { take(source); });
  }
}

void RankPipes::flush(const base::Deadline& deadline) {
  bool more = true;
  while (more) {
    for (Source& source : sources_) drain(source, false);
    more = tee_ && terminal_.full();
    if (tee_) terminal_.flush(deadline);
    more = more && !terminal_.full();
  }
}

void RankPipes::finish() {
  for (Source& source : sources_) {
    drain(source, true);
    if (!source.line.empty()) show_line(source, source.line);
    source.line.clear();
    source.pipe.reset();
  }
}

// Reads what is in the pipe now, and no more: somebody may write without end.
void RankPipes::drain(Source& source, bool all) {
  int left = 0;
  if (!source.pipe || ::ioctl(source.pipe.get(), FIONREAD, &left) != 0) return;
  for (; left > 0 && (all || !waits(source)); left -= static_cast<int>(kPiece)) {
    if (!take(source)) return;
  }
}

// One piece. False if there was none.
bool RankPipes::take(Source& source) {
  std::array<char, kPiece> bytes;
  const ssize_t count = ::read(source.pipe.get(), bytes.data(), bytes.size());
  if (count > 0) {
    const std::string_view text(bytes.data(), static_cast<std::size_t>(count));
    if (source.log != nullptr) source.log->write(text);
    if (source.queue != nullptr) show(source, text);
    return true;
  }
  if (count < 0) return false;  // nothing yet
  if (!source.line.empty()) show_line(source, source.line);
  source.line.clear();
  source.pipe.reset();
  return false;
}

void RankPipes::show(Source& source, std::string_view text) {
  source.line += text;
  std::string_view left = source.line;
  for (auto end = left.find('\n'); end != std::string_view::npos || left.size() >= kLongestLine;
       end = left.find('\n')) {
    const auto length = std::min(end == std::string_view::npos ? kLongestLine : end + 1, kLongestLine);
    show_line(source, left.substr(0, length));
    left.remove_prefix(length);
  }
  source.line.erase(0, source.line.size() - left.size());
}

void RankPipes::show_line(Source& source, std::string_view line) {
  source.queue->add(source.prefix);
  source.queue->add(line);
  if (line.back() != '\n') source.queue->add("\n");
}

}  // namespace lamina::launch
