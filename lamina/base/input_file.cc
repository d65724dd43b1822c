// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/input_file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::base {
namespace {

// A pipe may wait for somebody who opens it, and then for what he finds out before he writes.
constexpr std::chrono::seconds kComes{2};
constexpr std::chrono::seconds kWrites{60};
constexpr std::size_t kPiece = 1 << 16;

[[noreturn]] void fail(const std::string& before, const std::string& why) {
  throw ConfigError(str(before, "cannot be read: ", why));
}

}  // namespace

Fd open_input(const std::string& path, const std::string& before) {
  Fd file(::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  struct stat state{};
  if (!file || ::fstat(file.get(), &state) != 0) fail(before, system_error());
  if (S_ISDIR(state.st_mode)) fail(before, "it is a folder");
  const bool device = S_ISCHR(state.st_mode) || S_ISBLK(state.st_mode);
  if (device && ::isatty(file.get()) == 0) fail(before, "it is a device");
  return file;
}

std::string read_input(const Fd& file, const std::string& before, std::size_t most) {
  struct stat state{};
  const bool pipe = ::fstat(file.get(), &state) == 0 && S_ISFIFO(state.st_mode);
  bool waited = !pipe;  // for a writer
  std::string text;
  while (text.size() < most) {
    const auto had = text.size();
    text.resize(had + std::min(kPiece, most - had));
    const ssize_t count = ::read(file.get(), text.data() + had, text.size() - had);
    const int code = errno;
    text.resize(had + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
    if (count > 0 || (count < 0 && code == EINTR)) continue;
    if (count < 0 && code != EAGAIN) fail(before, system_error(code));
    if (count == 0 && pipe && waited && text.empty()) fail(before, "it is a pipe that nobody writes into");
    if (count == 0 && (waited || !text.empty())) return text;
    const auto limit = count == 0 ? kComes : kWrites;
    pollfd ready{.fd = file.get(), .events = POLLIN, .revents = 0};
    const bool silent = ::poll(&ready, 1, static_cast<int>(std::chrono::milliseconds(limit).count())) == 0;
    if (silent && count < 0) fail(before, str("nothing has come out of this pipe for ", limit.count(), " s"));
    waited = true;
  }
  return text;
}

std::string read_file(const std::string& path, const std::string& before, std::size_t most) {
  auto text = read_input(open_input(path, before), before, most + 1);
  if (text.size() > most) fail(before, str("it has more than ", most, " bytes"));
  return text;
}

}  // namespace lamina::base
