// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>

#include "lamina/observe/event.h"

// The recorder of this process. Where it is off, which it is at first, an event costs one look at `recording()`.
namespace lamina::observe {

constexpr std::size_t kMostEvents = 1'000'000;  // some 150 MB; later ones are counted and dropped

extern std::atomic<bool> recorder_is_on;
inline bool recording() { return recorder_is_on.load(std::memory_order_relaxed); }

std::int64_t now_ns();  // of the steady clock

void record(Event event);  // from any thread; nothing happens while the recorder is off
void record_memory();      // the bytes that this process has in memory now

// Forgets what was recorded before. `mine` has one rank: this one, without events.
void start_recording(Timeline mine);
Timeline stop_recording();  // what was given, with the events

// Records until this process exits, which writes a file for read_part().
void record_to(const std::string& path, Timeline mine);

}  // namespace lamina::observe
