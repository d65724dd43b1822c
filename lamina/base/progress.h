// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

namespace lamina::base {

// What a rank tells the launcher that started it: one datagram when a step begins and one when it ends; and one, with
// words behind it, when the rank is about to end because of an error of another one.
struct Progress {
  std::int64_t step = 0;
  std::int32_t process = 0;  // who says it
  std::int32_t inside = 0;   // 1: the step has begun, 0: it has ended, kConsequence

  static constexpr std::int32_t kConsequence = 2;
  static constexpr std::size_t kMostWords = std::size_t{32} * 1024;
};

// Sends them to the socket that LAMINA_PROGRESS_FD names; without one it does nothing. Never blocks, never fails.
class ProgressReporter {
 public:
  ProgressReporter();
  void begin(std::int64_t step) const { send(step, true); }
  void end(std::int64_t step) const { send(step, false); }
  // `words` say which error, the last kMostWords bytes of them. Whether a launcher will show them, or the first cause.
  bool consequence(std::string_view words) const;

 private:
  void send(std::int64_t step, bool inside) const;
  int socket_ = -1;  // the process's, not ours
};

}  // namespace lamina::base
