// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

namespace lamina::value {

// [Note: large blocks] The C library keeps large memory that was freed between blocks that are still in use, where a
// tensor of another size finds no room. So a process takes up to a third more than it uses. Memory that is given back
// to the system and asked for again, the system zeroes page by page, which costs more than the tensor's computation. So
// CPU memory of 1 MiB and more is here a block of its own, of the system's large pages, which cost a tenth of that. It
// goes back to the system at once, but for some blocks that are kept for the next tensor of the same size. Smaller
// memory is torch's own business.

// The allocator that does so, for the whole process. Thread-safe, in forked children too. Never destroyed.
c10::Allocator& large_blocks();

// Bytes from there, uninitialised: [size] of uint8.
at::Tensor large_block(std::int64_t size);

// Has torch take CPU memory from it, from now on, and keep little: for a job whose memory is full of tensors.
// Idempotent.
void take_memory_from_large_blocks();

// Bytes in blocks that nobody uses.
std::size_t kept_bytes();

}  // namespace lamina::value
