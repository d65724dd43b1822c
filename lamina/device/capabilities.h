// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <string>

// [Note: devices] A rank computes on one device: the host, or an accelerator. Other folders ask what a device can do,
// and know the name of none; the host's name, and copies to it, stand in this folder alone. (The namespace is not
// `device`, for lamina::device() is the program's.)
namespace lamina::devices {

inline constexpr at::DeviceType kHost = at::kCPU;

// Memory of this process, which its threads and kernels of ours read and write as it is.
bool is_host(at::Device device);
bool is_host(const at::Tensor& tensor);

// Computes later than it is called, in the order of a stream.
bool has_streams(at::Device device);

// The tensor with its memory on the host: itself where it lies there, else a copy, for which this thread waits.
at::Tensor on_host(const at::Tensor& tensor);

// The generator that operations on a device draw from. Locks are the caller's to take (at::Generator::mutex).
at::Generator generator(at::Device device);

// The name of the library, with NCCL's interface, that has collectives of such devices; "" where there is none.
std::string collective_library(at::Device device);

}  // namespace lamina::devices
