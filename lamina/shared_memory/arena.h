// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "lamina/base/fork_guard.h"
#include "lamina/shared_memory/segment.h"

namespace lamina::shared_memory {

// Memory at the end of a segment, for buffers that other processes read where they lie. Each piece of it keeps the
// segment mapped here, whatever else ends. What was freed is given out again, the lowest first, so that the pages that
// were once touched are used before others; they go back to the system with the segment. For all threads.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // From byte `begin` of the segment on, which is not 0.
  Arena(Segment segment, std::size_t begin);

  // Memory for any type, freed with the last that holds it. nullptr for 0 bytes, where there is no room, and in a child
  // of fork(), whose parent has the same memory.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);

  // The place of `data` in the segment; 0 where it does not lie in this arena.
  std::size_t offset_of(const std::byte* data) const;

 private:
  void free(std::size_t offset, std::size_t bytes);

  const Segment segment_;
  const std::size_t begin_;
  const base::MadeHere process_;
  std::mutex mutex_;
  std::map<std::size_t, std::size_t> free_;  // under it: offset and size of what nobody has; no two touch
};

}  // namespace lamina::shared_memory
