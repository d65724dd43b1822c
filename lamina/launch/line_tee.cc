// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/line_tee.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>

#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/error.h"

namespace lamina::launch {
namespace {

constexpr std::size_t kLongestLine = 1 << 16;  // a longer one is cut

}  // namespace

base::Fd LineTee::add(base::Rank rank, int fd, int copy) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw StartError("cannot make a pipe: " + base::system_error());
  base::Fd reader(ends[0]), writer(ends[1]);
  ::fcntl(reader.get(), F_SETFL, O_NONBLOCK);
  Outlet* outlet = fd == STDERR_FILENO ? &terminal_.err() : &terminal_.out();
  sources_.push_back({std::move(reader), base::str("[", rank, "] "), outlet, copy, {}});
  return writer;
}

void LineTee::watch(Watch& watch) {
  for (Source& source : sources_) {
    if (source.pipe && !source.outlet->full()) watch.add(source.pipe.get(), POLLIN, [&source] { take(source); });
  }
}

void LineTee::flush(const base::Deadline& deadline) {
  bool more = true;
  while (more) {
    for (Source& source : sources_) {
      if (source.pipe) take(source);
    }
    more = terminal_.full();
    terminal_.flush(deadline);
    more = more && !terminal_.full();
  }
}

void LineTee::finish() {
  for (Source& source : sources_) {
    if (source.pipe) take(source, true);
  }
}

void LineTee::take(Source& source, bool all) {
  std::array<char, 65536> bytes;
  ssize_t count = -1;  // 0 is the end
  while ((all || !source.outlet->full()) && (count = ::read(source.pipe.get(), bytes.data(), bytes.size())) > 0) {
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
  source.outlet->add(source.prefix);
  source.outlet->add(std::string_view(source.line).substr(0, length));
  if (source.line[length - 1] != '\n') source.outlet->add("\n");
  source.line.erase(0, length);
}

}  // namespace lamina::launch
