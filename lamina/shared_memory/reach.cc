// SPDX-License-Identifier: Apache-2.0
#include "lamina/shared_memory/reach.h"

#include <algorithm>
#include <bit>
#include <ctime>

namespace lamina::shared_memory {
namespace {

void add(int& rounds, double& least, std::chrono::nanoseconds took, std::size_t bytes) {
  const auto each = static_cast<double>(took.count()) / static_cast<double>(bytes);
  least = rounds++ == 0 ? each : std::min(least, each);
}

}  // namespace

std::chrono::nanoseconds Trial::now() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

void Trial::add_staged(std::chrono::nanoseconds took, std::size_t bytes) { add(staged_rounds, staged, took, bytes); }
void Trial::add_read(std::chrono::nanoseconds took, std::size_t bytes) { add(read_rounds, read, took, bytes); }

Way way_of(std::span<const Trial> trials) {
  double staged = 0, read = 0;
  for (const auto& trial : trials) {
    if (std::min(trial.staged_rounds, trial.read_rounds) < Trial::kRounds) return Way::kInTurns;
    staged += trial.staged;
    read += trial.read;
  }
  return read <= staged ? Way::kRead : Way::kStaged;
}

// A member's, in its staging memory: see [Note: words].
struct Reach::Words {
  std::uint64_t offset;  // of its buffer in its segment; 0: it does not lie there
  std::uint64_t address;
  bool may_read;  // the memory of all others
  Trial trial;    // of buffers of this size
  std::array<char, base::PeerMemory::kDescriptorSize> memory;
};

Reach::Reach(Exchange& exchange, const Arena& arena, const std::vector<std::byte*>& segments, Reading reading)
    : exchange_(exchange),
      arena_(arena),
      segments_(segments),
      reading_(reading),
      descriptor_(base::PeerMemory::descriptor()) {}

Reach::Words& Reach::words(int member) const { return *reinterpret_cast<Words*>(exchange_.staging(member)); }

Reach::Places Reach::Places::from(std::size_t bytes) const {
  auto rest = *this;
  for (auto& place : rest.mapped) place = place == nullptr ? nullptr : place + bytes;
  for (auto& address : rest.addresses) address += bytes;
  return rest;
}

Reach::Places Reach::find(const std::byte* data, std::size_t bytes) {
  if (exchange_.met()) exchange_.next_chunk();
  constexpr Trial kDecided{Trial::kRounds, Trial::kRounds, 0, 0};  // as the others found
  Places places;
  places.trial =
      &trials_.try_emplace(std::bit_width(bytes), reading_ == Reading::kWhereFaster ? Trial() : kDecided).first->second;
  auto& own = words(exchange_.rank());
  own = {arena_.offset_of(data), reinterpret_cast<std::uint64_t>(data), may_read_, *places.trial, {}};
  std::ranges::copy(descriptor_, own.memory.begin());
  exchange_.meet();
  bool all_mapped = true, all_may = bytes >= kReadBytes;
  std::vector<Trial> trials;
  for (int member = 0; member < exchange_.size(); ++member) {
    const auto& each = words(member);
    places.mapped.push_back(each.offset == 0 ? nullptr : segments_[member] + each.offset);
    places.addresses.push_back(each.address);
    trials.push_back(each.trial);
    all_mapped = all_mapped && each.offset != 0;
    all_may = all_may && each.may_read;
  }
  if (all_mapped) {
    places.way = Way::kRead;
  } else if (all_may) {
    places.way = way_of(trials);
  } else if (bytes >= kReadBytes && peers_.empty()) {
    learn();
  }
  return places;
}

// The next operation tells the others.
void Reach::learn() {
  for (int member = 0; member < exchange_.size(); ++member) {
    const auto& memory = words(member).memory;
    peers_.emplace_back(std::string(memory.begin(), memory.end()));
  }
  may_read_ = reading_ != Reading::kNever && std::ranges::all_of(peers_, &base::PeerMemory::readable);
}

const std::byte* Reach::read(const Places& places, int member, std::size_t begin, std::size_t bytes, std::byte* to) {
  if (places.mapped[member] != nullptr) return places.mapped[member] + begin;
  if (!peers_[member].read(to, places.addresses[member] + begin, bytes)) {
    may_read_ = may_read_ && peers_[member].readable();  // from now on
    exchange_.explain(member, "its memory could not be read: a tensor is left alone until its collective has ended");
  }
  return to;
}

}  // namespace lamina::shared_memory
