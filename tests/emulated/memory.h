// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>

namespace c10 {
struct Allocator;
struct DeviceAllocator;
class DataPtr;
class Stream;
}  // namespace c10

namespace emulated {

// [Note: memory] Blocks are used again in the order of the stream that they were made for, as CUDA's caching allocator
// does it. A block is free at once: its next kernels come after its last ones. Blocks that were recorded on other
// streams wait until those have passed. Freed memory becomes NaNs in the order of its stream.
c10::DeviceAllocator& device_memory();

// Memory of the host from which copies need not wait; known to torch as pinned. It is freed after the copies that were
// recorded with record_pinned.
c10::Allocator& pinned_memory();
bool is_pinned(const void* address);
void record_pinned(const void* address, const c10::Stream& stream);

// Returns the bytes of a device: now, and at most since the last reset.
std::pair<std::size_t, std::size_t> allocated_bytes(int device);
void reset_peak_bytes(int device);

}  // namespace emulated
