// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "lamina/base/fd.h"

namespace lamina::shared_memory {

// Memory that several processes map. It has no name, so nothing of it outlives them, however they end; its size is
// sealed, so none of them can take it from the others. Core dumps leave it out: much of it may be address space alone.
class Segment {
 public:
  // Makes one of `bytes`, all zero; pages that nobody touches take no memory. Throws base::Error.
  explicit Segment(std::size_t bytes);
  // Maps that of another process, which sent its descriptor. Throws base::Error where it is no such segment, or
  // smaller.
  Segment(base::Fd fd, std::size_t bytes);
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  // For another process, to map it too; only of one that was made here, and until it is closed.
  int fd() const { return fd_.get(); }
  void close_fd() { fd_.reset(); }

 private:
  void map();

  base::Fd fd_;
  std::size_t size_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace lamina::shared_memory
