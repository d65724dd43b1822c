// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/turn_times.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "lamina/device/memory.h"

namespace lamina::runtime {
namespace {

struct Waiting {
  observe::Recorder* recorder;
  observe::Event event;
  devices::Moment begin, end;
};

// All recorders of the process have one device.
struct Waitings {
  std::mutex mutex;
  std::deque<Waiting> all;
};

Waitings& waitings() {
  static auto& made = *new Waitings;  // events are not destroyed after their device
  return made;
}

// True where it has passed, and was recorded.
bool record_if_passed(Waiting& waiting) {
  const auto end = waiting.end.ns();
  if (!end) return false;
  const auto begin = waiting.begin.ns();
  waiting.event.begin_ns = std::min(begin.value_or(*end), *end);
  waiting.event.end_ns = *end;
  waiting.recorder->record(std::move(waiting.event));
  return true;
}

void record_passed(Waitings& waitings) {
  while (!waitings.all.empty() && record_if_passed(waitings.all.front())) waitings.all.pop_front();
}

}  // namespace

void record(observe::Recorder& recorder, observe::Event event, const devices::Moment& begin,
            const devices::Moment& end) {
  if (end.is_of_host()) {
    event.end_ns = *end.ns();
    event.begin_ns = begin.ns().value_or(event.end_ns);
    return recorder.record(std::move(event));
  }
  auto& waiting = waitings();
  const std::lock_guard lock(waiting.mutex);
  waiting.all.push_back({&recorder, std::move(event), begin, end});
  record_passed(waiting);
}

void record_passed() {
  auto& waiting = waitings();
  const std::lock_guard lock(waiting.mutex);
  record_passed(waiting);
}

void forget_turns(const observe::Recorder& recorder) {
  auto& waiting = waitings();
  const std::lock_guard lock(waiting.mutex);
  std::erase_if(waiting.all, [&](const Waiting& each) { return each.recorder == &recorder; });
}

void record_memory(observe::Recorder& recorder) {
  const auto on_device = devices::tensor_bytes();
  if (!on_device) return recorder.record_memory();
  const auto now = observe::now_ns();
  recorder.record({.what = observe::What::kMemory, .begin_ns = now, .end_ns = now, .bytes = on_device->now});
}

}  // namespace lamina::runtime
