// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/environment/world.h"

namespace lamina::launch {

// How many NVIDIA GPUs a process started from here would see, found without a library: the device files, narrowed by
// CUDA_VISIBLE_DEVICES as CUDA reads it (up to the first entry that names none).
int visible_gpus(const environment::Environment& environment, const std::string& device_folder = "/dev");

}  // namespace lamina::launch
