// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "lamina/observe/event.h"

namespace lamina::observe {

constexpr std::size_t kMostEvents = 1'000'000;  // some 150 MB; later ones are counted and dropped

std::int64_t now_ns();  // of the steady clock

// Sums of what was recorded.
struct Totals {
  std::int64_t step_ns = 0;
  std::int64_t compute_ns = 0;
  std::int64_t messages = 0;  // sent
  std::int64_t bytes = 0;     // sent
  std::int64_t peak_bytes = 0;
};

// The recorder of one rank's events. Off at first: then recording costs one look at `on()`. May be used from
// any thread, but for what is said of the file.
class Recorder {
 public:
  bool on() const { return on_.load(std::memory_order_relaxed); }

  void record(Event event);  // nothing happens while it is off
  void record_memory();      // the bytes that this process has in memory now

  // Keeps all events. `mine` has one rank: this one, without events. What was kept before is forgotten.
  void start(Timeline mine);
  bool keeps_events() const;
  Timeline stop();  // what was given to start(), with the events

  // Also, or only, adds them up, from the first time on.
  void start_counting();
  Totals take_totals();  // since the last time

  // Keeps events as start() does, also in a file that read_part() reads: whoever starts ranks may end them before they
  // can say a last word. save() writes what is new there; save_sometimes() the same, but not twice in a second. All
  // three are called by one thread.
  void start_part(std::string path, Timeline mine);
  void save();
  void save_sometimes();

 private:
  void update();  // under the lock

  std::atomic<bool> on_ = false;
  mutable std::mutex mutex_;
  bool keeps_events_ = false;
  bool counts_ = false;
  Timeline recorded_{.ranks = {RankRecord()}};
  Totals totals_;
  std::optional<std::string> part_;
  std::size_t saved_ = 0;      // events that the file has
  std::int64_t saved_ns_ = 0;  // when
  bool told_ = false;          // that it could not be written
};

// Records an event that lasts as long as this object; nothing without a recorder, or where it is off. `event()` says
// what it is.
class Span {
 public:
  template <class MakeEvent>
  Span(Recorder* recorder, const MakeEvent& event) {
    if (recorder == nullptr || !recorder->on()) return;
    recorder_ = recorder;
    event_ = event();
    event_.begin_ns = now_ns();
  }
  ~Span() {
    if (recorder_ == nullptr) return;
    event_.end_ns = now_ns();
    recorder_->record(std::move(event_));
  }
  Span(const Span&) = delete;

 private:
  Recorder* recorder_ = nullptr;
  Event event_;
};

}  // namespace lamina::observe
