// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"

namespace lamina::base {

// A call of the program, as messages name it.
struct Call {
  std::string name;   // "lamina.barrier()"; "" where it is not known
  std::string where;  // of the user's code: "train.py:12"; the same
  std::string part;   // of ours which is being executed, the same on all ranks that make this call; "" for any
};

// How long a wait may take, and what may end it early.
struct Patience {
  Clock::duration timeout = std::chrono::seconds(1800);
  // Called at least every 50 ms, without the lock; may throw. Empty on threads that nobody interrupts.
  std::function<void()> check_interrupt;
  // Told once when the wait is long, in one line; empty where long waits are normal.
  std::function<void(const std::string&)> tell = [](const std::string& line) { log_warning(line); };
  std::string who;             // begins the text of TimeoutError: "rank 2 waited for the "; in a log each line says it
  std::function<Call()> call;  // the one that waits; in its own thread, without locks. Empty: not known
  // The end of several waits that are one to whoever waits: their times do not add up. None: this wait is alone.
  std::optional<Deadline> by = {};
};

constexpr auto kInterruptSlice = std::chrono::milliseconds(50);  // how late Ctrl-C may be noticed
constexpr auto kSlow = std::chrono::seconds(10);                 // a longer wait is told of, once

// Says that a wait takes long, and ends it. `what()` is a clause such as "forward of h.5 on rank 1 (microbatch
// 2)".
class LongWait {
 public:
  explicit LongWait(const Patience& patience)
      : patience_(patience),
        begin_(patience.by ? patience.by->at() - patience.timeout : Clock::now()),
        deadline_(patience.by.value_or(Deadline::after(patience.timeout))),
        told_(!patience.tell) {}

  const Deadline& deadline() const { return deadline_; }
  bool expired() const { return deadline_.expired(); }
  // Tells of it, once, after 10 s; throws TimeoutError at the end of the patience.
  template <class What>
  void check(const What& what) {
    if (expired()) {
      throw TimeoutError(
          str(patience_.who, what(), ": no answer for ", seconds(), " s; raise timeout_s if it needs longer"));
    }
    if (told_ || Clock::now() - begin_ < kSlow) return;
    told_ = true;
    patience_.tell(str(what(), ": no answer for ", seconds(), " s, still waiting"));
  }

 private:
  std::int64_t seconds() const {
    return std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - begin_).count();
  }

  const Patience& patience_;
  const Clock::time_point begin_;
  const Deadline deadline_;
  bool told_;
};

// Waits until `ready()`. It is called under the lock, and may throw, which ends the wait; see LongWait.
template <class Ready, class What>
void wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, const Patience& patience,
                const Ready& ready, const What& what) {
  LongWait wait(patience);
  while (!ready()) {
    const Clock::duration slice = patience.check_interrupt ? kInterruptSlice : kSlow;
    changed.wait_until(lock, wait.deadline().slice(slice));
    if (ready()) return;
    if (patience.check_interrupt) {
      lock.unlock();
      patience.check_interrupt();
      lock.lock();
    }
    if (wait.expired() && ready()) return;
    wait.check(what);
  }
}

}  // namespace lamina::base
