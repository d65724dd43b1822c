// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>

namespace lamina::command {

// A line on a terminal's stderr that says how far something is; nothing where stderr is none. Gone with the object.
class ProgressBar {
 public:
  explicit ProgressBar(const char* doing) : doing_(doing), shown_(::isatty(STDERR_FILENO) == 1) {}
  ~ProgressBar() {
    if (drawn_) std::fprintf(stderr, "\r\033[K");
  }
  ProgressBar(const ProgressBar&) = delete;

  void operator()(std::uint64_t bytes, std::uint64_t all) {
    constexpr auto kPause = std::chrono::milliseconds(100);
    constexpr double kGiga = 1e9;
    const auto now = std::chrono::steady_clock::now();
    if (!shown_ || all == 0 || now - last_ < kPause) return;
    last_ = now;
    drawn_ = true;
    const double seconds = std::chrono::duration<double>(now - begin_).count();
    const auto rate = seconds > 0 ? static_cast<double>(bytes) / kGiga / seconds : 0;
    std::fprintf(stderr, "\r\033[K%s: %.0f %% of %.2f GB, %.2f GB/s", doing_,
                 100.0 * static_cast<double>(bytes) / static_cast<double>(all), static_cast<double>(all) / kGiga, rate);
    std::fflush(stderr);
  }

 private:
  const char* const doing_;
  const bool shown_;
  bool drawn_ = false;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last_ = begin_;
};

}  // namespace lamina::command
