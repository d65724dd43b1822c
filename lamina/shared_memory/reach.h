// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "lamina/base/peer_memory.h"
#include "lamina/shared_memory/arena.h"
#include "lamina/shared_memory/exchange.h"

namespace lamina::shared_memory {

// When a member reads others' large buffers in the memory of their processes: where that has been found to be the
// faster, wherever it may, never. Members may say different things: one that never reads has all others stage.
enum class Reading : std::uint8_t { kWhereFaster, kWherePossible, kNever };

// Times of one member for two ways of the same work: staging buffers, and reading them where they lie. It counts what
// its thread takes of the processor, and of several times the least: so it finds the same on a busy machine.
struct Trial {
  static constexpr int kRounds = 8;  // of each way

  int staged_rounds = 0, read_rounds = 0;
  double staged = 0, read = 0;  // nanoseconds a byte

  static std::chrono::nanoseconds now();  // processor time of this thread
  void add_staged(std::chrono::nanoseconds took, std::size_t bytes);
  void add_read(std::chrono::nanoseconds took, std::size_t bytes);
};

enum class Way : std::uint8_t { kStaged, kRead, kInTurns };
// The way for all, by what each of the members has found: both in turns until all have enough rounds.
Way way_of(std::span<const Trial> trials);

// Members' buffers as this member reads them where they lie: in arenas, which are mapped here, or in the memory of the
// others' processes. The system may withhold that (it is a debugger's right): then no member reads any, and all stage
// what lies there. And it may be slow, by the machine and the number of members: so they measure it.
//
// [Note: words] In each operation that asks, every member stages what it knows of all that: its words. All decide by
// the words of all, and so alike, whatever some of them have missed of an operation that was given up. The first
// operation tells who may read, and is staged. Those after it take both ways in turns, a part of their buffers by each,
// until all members have measured them often enough. They measure buffers of each size, to a power of two, as the
// caches matter.
class Reach {
 public:
  // From so many bytes on a buffer in ordinary memory is read there: of less the system's work takes longer than
  // copies.
  static constexpr std::size_t kReadBytes = std::size_t{1} << 20;

  // `segments`: of each member, mapped here. They, the exchange and the arena, this member's own, outlive it.
  Reach(Exchange& exchange, const Arena& arena, const std::vector<std::byte*>& segments, Reading reading);

  // A buffer of each member, by member.
  struct Places {
    std::vector<const std::byte*> mapped;  // nullptr for one that lies in ordinary memory ...
    std::vector<std::uint64_t> addresses;  // ... at this place of its process
    Way way = Way::kStaged;                // of those that are not mapped
    Trial* trial = nullptr;                // this member's, of buffers as large

    Places from(std::size_t bytes) const;  // of the rest of the buffers
  };
  // In an operation, for a buffer of as many bytes on all members: says where this one's lies, and hears of the
  // others'. All get the same.
  Places find(const std::byte* data, std::size_t bytes);

  // Bytes of a member's buffer from `begin` on: where they are mapped, else copied to `to`. Throws what
  // Exchange::explain() throws.
  const std::byte* read(const Places& places, int member, std::size_t begin, std::size_t bytes, std::byte* to);

 private:
  struct Words;
  Words& words(int member) const;
  void learn();

  Exchange& exchange_;
  const Arena& arena_;
  const std::vector<std::byte*>& segments_;
  const Reading reading_;
  const std::string descriptor_;         // of this process's memory
  std::vector<base::PeerMemory> peers_;  // of all members, once they are known
  bool may_read_ = false;                // the memory of all of them
  std::map<int, Trial> trials_;          // by the size's power of two
};

}  // namespace lamina::shared_memory
