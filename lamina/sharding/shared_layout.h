// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace lamina::sharding {

// [Note: shared memory of a sharding group] Values lie there whole, once for all members: so a value comes without a
// copy, and each member changes its own shard of it. Beside them every member has an arena, into which it copies its
// gradients, and words that say how far it is. A word is the number of a pass, and of gradients in that pass; words of
// earlier passes count as none.
//
//   gradient k of a parameter   its member copies it to its arena and *posts* k. When all members have posted k, or
//                               have ended the pass with fewer, each sums its own shard, in the order of the members,
//                               and says that it has *summed* k. When all have, the memory is its member's again.
//   the end of a pass           a member that has its last gradient says the *total* of each parameter, and *ends* the
//                               pass; one that has summed all that all have is *done*. When all are done, the pass is
//                               over.
//
// Nobody has to wait inside a pass. A member keeps a gradient until later while the parameter's last one is still being
// summed, and where it would be too much at once. Only a member that keeps much waits for the others to catch up. At
// the end of a pass each member posts the lowest-numbered parameter that it has left, whatever room it takes. So all
// members that have the lowest of all post that one, and it is summed: members never wait for each other with different
// parameters.
struct Word {
  std::int64_t pass = -1;
  std::int64_t count = 0;

  std::uint64_t pack() const { return static_cast<std::uint64_t>(pass + 1) << 24 | static_cast<std::uint64_t>(count); }
  static Word unpack(std::uint64_t packed) {
    return {static_cast<std::int64_t>(packed >> 24) - 1, static_cast<std::int64_t>(packed & 0xffffff)};
  }
};

// Offsets of everything in the group's memory, the same on all members.
class SharedLayout {
 public:
  // `value_bytes`: of each parameter, with its padding. `arena_bytes`: of each member.
  SharedLayout(int members, std::vector<std::size_t> value_bytes, std::size_t arena_bytes);

  std::size_t bytes() const { return bytes_; }

  std::size_t value(std::size_t parameter) const { return values_[parameter]; }
  std::size_t arena(int member) const { return arenas_ + static_cast<std::size_t>(member) * arena_bytes_; }

  // Words.
  std::size_t ended(int member) const { return word(0, member); }
  std::size_t done(int member) const { return word(1, member); }
  std::size_t posted(std::size_t parameter, int member) const { return word(2 + 4 * parameter, member); }
  std::size_t place(std::size_t parameter, int member) const { return word(3 + 4 * parameter, member); }
  std::size_t summed(std::size_t parameter, int member) const { return word(4 + 4 * parameter, member); }
  std::size_t total(std::size_t parameter, int member) const { return word(5 + 4 * parameter, member); }

 private:
  std::size_t word(std::size_t row, int member) const {
    return (row * static_cast<std::size_t>(members_) + static_cast<std::size_t>(member)) * sizeof(std::uint64_t);
  }

  int members_;
  std::size_t arena_bytes_;
  std::vector<std::size_t> values_;
  std::size_t arenas_ = 0;
  std::size_t bytes_ = 0;
};

// Pieces of an arena: the lowest that fits, so that little of it is ever touched.
class Pieces {
 public:
  explicit Pieces(std::size_t bytes) : bytes_(bytes) {}
  // Bytes that a piece takes of the arena.
  static std::size_t size(std::size_t bytes);

  std::optional<std::size_t> take(std::size_t bytes);  // none where no gap is large enough
  void give_back(std::size_t begin) { taken_.erase(begin); }
  void give_back_all() { taken_.clear(); }
  std::size_t in_use() const;  // bytes

 private:
  std::size_t bytes_;
  std::map<std::size_t, std::size_t> taken_;  // begin to end
};

}  // namespace lamina::sharding
