// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/DeviceType.h>

#include <cstddef>
#include <string>
#include <vector>

// State of the devices as wholes: addresses, errors, which of them were touched, what the host did.
namespace emulated {

inline constexpr auto kType = c10::DeviceType::PrivateUse1;

// [Note: two ranges] Tensors point into a range of addresses that nobody may touch. Kernels work in its twin, a range
// of the same size with the bytes: an access of the host's ends in SIGSEGV, and the system reads nothing there for
// others.
inline constexpr std::size_t kSpace = std::size_t(1) << 40;
inline constexpr std::size_t kPage = 4096;
char* device_range();
char* twin(const void* address);

// [Note: sticky errors] A kernel that failed breaks its device: no later kernel runs there, and every call that asks
// after the device throws, with what was said first.
void fail(int device, const std::string& what);
bool is_failed(int device);
void check(int device);  // throws c10::AcceleratorError if a kernel failed, or if this process is a fork

// Remembers that something was done with the device; a real one would have a context from now on.
void touch(int device);
bool is_touched(int device);

// A fork of a process that used devices has none of their threads.
bool is_forked();

void count_enqueued();
void count_drained(const std::string& operation);
void count_wait();

}  // namespace emulated
