// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

// Random numbers as accelerators draw them: the host's part of a generator is a seed and an offset, and each kernel
// draws from a sequence of its own that these two name.
namespace emulated {

const at::Generator& default_generator(int device);

at::Generator make_generator(int device);

// A generator of the CPU's for one kernel; moves the offset of the given generator, or of the device's default one.
at::Generator kernel_generator(const std::optional<at::Generator>& given, int device);

}  // namespace emulated
