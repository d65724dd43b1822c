// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/recorder.h"

#include <fcntl.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <utility>

#include "lamina/base/fd.h"
#include "lamina/observe/timeline_part.h"

namespace lamina::observe {
namespace {

std::mutex mutex;
Timeline recorded{.ranks = {RankRecord()}};  // of one rank; guarded by mutex

// The second number of /proc/self/statm: pages in memory.
std::int64_t resident_bytes() {
  static const base::Fd file(::open("/proc/self/statm", O_RDONLY | O_CLOEXEC));
  char text[64];
  const ssize_t size = ::pread(file.get(), text, sizeof text, 0);
  if (size <= 0) return 0;
  const char* at = text;
  while (at < text + size && *at != ' ') ++at;
  std::int64_t pages = 0;
  if (at < text + size) std::from_chars(at + 1, text + size, pages);
  static const std::int64_t page_bytes = ::sysconf(_SC_PAGESIZE);
  return pages * page_bytes;
}

}  // namespace

std::atomic<bool> recorder_is_on = false;

std::int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void record(Event event) {
  std::lock_guard guard(mutex);
  if (!recording()) return;
  RankRecord& mine = recorded.ranks.front();
  if (mine.events.size() < kMostEvents) {
    mine.events.push_back(std::move(event));
  } else {
    ++mine.dropped;
  }
}

void record_memory() {
  const auto now = now_ns();
  record({.what = What::kMemory, .begin_ns = now, .end_ns = now, .bytes = resident_bytes()});
}

void start_recording(Timeline mine) {
  std::lock_guard guard(mutex);
  recorded = std::move(mine);
  recorder_is_on = true;
}

Timeline stop_recording() {
  std::lock_guard guard(mutex);
  recorder_is_on = false;
  return recorded;
}

void record_to(const std::string& path, Timeline mine) {
  static std::string part;
  part = path;
  start_recording(std::move(mine));
  std::atexit([] { write_part(stop_recording(), part); });
}

}  // namespace lamina::observe
