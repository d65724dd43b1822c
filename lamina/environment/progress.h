// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

namespace lamina::environment {

// Reports of a rank to the launcher that started it, a datagram each. It says when it begins to wait for the others in
// init, and has met them; when a session begins, with how long its waits may last, and when one is over. It says when a
// step begins and ends, when it waits for others and when no more, that it leaves a job that goes on, and who is lost
// to one. One with words behind it says that the rank is about to end because of another one's error.
struct Progress {
  std::int64_t step = 0;     // kPatience, kTimeout: milliseconds; kLost: a process
  std::int32_t process = 0;  // who says it
  std::int32_t inside = 0;   // 1: the step has begun, 0: it has ended, or one of these

  static constexpr std::int32_t kConsequence = 2;
  static constexpr std::int32_t kClosed = 3;
  static constexpr std::int32_t kPatience = 4;  // how long ranks on other machines wait for this one before they end
  static constexpr std::int32_t kJoining = 5;   // step 1: it waits for the others in init, 0: they have met
  static constexpr std::int32_t kLeaves = 6;    // in order, from a job that goes on without it
  static constexpr std::int32_t kLost = 7;      // step: a process of this machine, without which the job goes on
  static constexpr std::int32_t kWaits = 8;     // step 1: for others, and computes nothing meanwhile; 0: no more
  static constexpr std::int32_t kTimeout = 9;   // how long one of its waits may last before it ends by an error
  static constexpr std::size_t kMostWords = std::size_t{32} * 1024;
};

// Sends them to the socket that LAMINA_PROGRESS_FD names; without one it does nothing. Never fails; blocks in close()
// alone, for a second at most, while the launcher has not read what came before.
class ProgressReporter {
 public:
  ProgressReporter();
  void begin(std::int64_t step) const { send(step, 1); }
  void end(std::int64_t step) const { send(step, 0); }
  void close() const;
  void patience(std::chrono::milliseconds others) const { send(others.count(), Progress::kPatience); }
  void joining(bool begins) const { send(begins ? 1 : 0, Progress::kJoining); }
  void leaves() const { send(0, Progress::kLeaves); }
  void waits(bool begins) const { send(begins ? 1 : 0, Progress::kWaits); }
  void timeout(std::chrono::milliseconds own) const { send(own.count(), Progress::kTimeout); }
  void lost(int process) const { send(process, Progress::kLost); }
  // `words` say which error, the last kMostWords bytes of them. Whether a launcher will show them, or the first cause.
  bool consequence(std::string_view words) const;

 private:
  void send(std::int64_t step, std::int32_t inside) const;
  int socket_ = -1;  // the process's, not ours
};

}  // namespace lamina::environment
