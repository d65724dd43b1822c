// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/silence.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace lamina::transport {
namespace {

constexpr int kSigns = 8;                                // within the limit: some may be late
constexpr auto kLongestPause = std::chrono::seconds(2);  // between two of them
constexpr auto kLastWords = std::chrono::seconds(5);     // after it has stood still, for what others said to be read

constexpr auto kSlice = std::chrono::milliseconds(5);

struct Watching {
  std::mutex mutex;
  std::set<const Silence*> all;
};
Watching& watching() {
  static Watching one;
  return one;
}

}  // namespace

Silence::Silence(int size, base::Clock::duration limit, Time now)
    : limit_(limit),
      each_(std::min<base::Clock::duration>(limit / kSigns, kLongestPause)),
      last_(now),
      next_sign_(now),
      heard_(static_cast<std::size_t>(size)) {
  auto& [mutex, all] = watching();
  const std::lock_guard guard(mutex);
  all.insert(this);
}

Silence::~Silence() {
  auto& [mutex, all] = watching();
  const std::lock_guard guard(mutex);
  all.erase(this);
}

void Silence::await_looks() {
  auto& [mutex, all] = watching();
  std::unique_lock lock(mutex);
  std::map<const Silence*, std::int64_t> before;
  for (const Silence* each : all) before[each] = each->looks_;
  // Two: the thread takes what its first look has found before the second one. A thread that has ended looks no more.
  const auto has_looked = [&](const auto& one) {
    return !all.contains(one.first) || one.first->looks_ > one.second + 1;
  };
  for (const auto by = base::Deadline::after(kLastWords); !std::ranges::all_of(before, has_looked) && !by.expired();) {
    lock.unlock();
    std::this_thread::sleep_for(kSlice);
    lock.lock();
  }
}

bool Silence::look(Time now) {
  ++looks_;
  const auto gap = now - last_;
  last_ = now;
  looked_ += std::min(gap, each_);
  if (gap >= limit_ / 2) {
    stood_still_ = true;
    awake_ = now;
  } else if (now - awake_ > kLastWords) {
    stood_still_ = false;
  }
  if (now < next_sign_) return false;
  next_sign_ = now + each_;
  return true;
}

}  // namespace lamina::transport
