// SPDX-License-Identifier: Apache-2.0
#include "lamina/observe/recorder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/fd.h"
#include "lamina/base/log.h"
#include "lamina/observe/timeline_part.h"

namespace lamina::observe {
namespace {

constexpr std::int64_t kSavePeriodNs = 1'000'000'000;

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

void add(Totals& totals, const Event& event) {
  switch (event.what) {
    case What::kForward:
    case What::kBackward:
    case What::kWeights:
      totals.compute_ns += event.end_ns - event.begin_ns;
      break;
    case What::kStep:
      totals.step_ns += event.end_ns - event.begin_ns;
      break;
    case What::kSend:
      ++totals.messages;
      totals.bytes += event.bytes;
      break;
    case What::kMemory:
      totals.peak_bytes = std::max(totals.peak_bytes, event.bytes);
      break;
    case What::kWait:
    case What::kReceive:
    case What::kCollective:
      break;
  }
}

}  // namespace

std::int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void Recorder::record(Event event) {
  std::lock_guard guard(mutex_);
  if (counts_) add(totals_, event);
  if (!keeps_events_) return;
  RankRecord& mine = recorded_.ranks.front();
  if (mine.events.size() < kMostEvents) {
    mine.events.push_back(std::move(event));
  } else {
    ++mine.dropped;
  }
}

void Recorder::record_memory() {
  const auto now = now_ns();
  record({.what = What::kMemory, .begin_ns = now, .end_ns = now, .bytes = resident_bytes()});
}

void Recorder::start(Timeline mine) {
  std::lock_guard guard(mutex_);
  recorded_ = std::move(mine);
  keeps_events_ = true;
  update();
}

bool Recorder::keeps_events() const {
  std::lock_guard guard(mutex_);
  return keeps_events_;
}

Timeline Recorder::stop() {
  std::lock_guard guard(mutex_);
  keeps_events_ = false;
  update();
  return recorded_;
}

void Recorder::start_counting() {
  std::lock_guard guard(mutex_);
  if (counts_) return;
  counts_ = true;
  update();
}

Totals Recorder::take_totals() {
  std::lock_guard guard(mutex_);
  return std::exchange(totals_, {});
}

void Recorder::start_part(std::string path, Timeline mine) {
  start(std::move(mine));
  std::filesystem::remove(path);  // of an earlier session, or start, of this rank
  part_ = std::move(path);
}

void Recorder::save() {
  if (!part_) return;
  Timeline fresh;
  {
    std::lock_guard guard(mutex_);
    const RankRecord& mine = recorded_.ranks.front();
    if (mine.events.size() == saved_) return;
    const auto begin = mine.events.begin() + static_cast<std::ptrdiff_t>(saved_);
    fresh = {recorded_.schedule,
             recorded_.active_microbatches,
             {{mine.rank, mine.leader, mine.ahead_ns, mine.dropped, {begin, mine.events.end()}}}};
    saved_ = mine.events.size();
  }
  saved_ns_ = now_ns();
  try {
    append_to_part(fresh, *part_);
  } catch (const base::Error& error) {  // another time, if there is room then
    if (!std::exchange(told_, true)) base::log_warning(error.what());
    std::lock_guard guard(mutex_);
    saved_ -= fresh.ranks.front().events.size();
  }
}

void Recorder::save_sometimes() {
  if (part_ && now_ns() - saved_ns_ > kSavePeriodNs) save();
}

void Recorder::update() { on_ = keeps_events_ || counts_; }

}  // namespace lamina::observe
