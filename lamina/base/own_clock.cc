// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/own_clock.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "lamina/base/deadline.h"

namespace lamina::base {
namespace {

// The file has three numbers: nanoseconds on a processor, those of waits for one, and turns.
std::chrono::nanoseconds waited(int file) {
  std::array<char, 96> text{};
  if (::pread(file, text.data(), text.size() - 1, 0) <= 0) return {};
  char* after = nullptr;
  std::strtoull(text.data(), &after, 10);
  return std::chrono::nanoseconds(std::strtoull(after, nullptr, 10));
}

}  // namespace

OwnClock::OwnClock() : delays_(::open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC)) {
  auto shortest = std::chrono::nanoseconds::max();
  for (int i = 0; i < 8; ++i) {
    const auto began = now();
    shortest = std::min(shortest, now() - began);
  }
  reading_ = shortest;
}

std::chrono::nanoseconds OwnClock::now() {
  if (!delays_) return Clock::now().time_since_epoch();
  for (;;) {
    const auto before = waited(delays_.get());
    const auto now = Clock::now().time_since_epoch();
    if (waited(delays_.get()) == before) return now - before - reading_ * readings_++;
  }
}

}  // namespace lamina::base
