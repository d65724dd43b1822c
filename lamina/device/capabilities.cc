// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/capabilities.h"

#include <ATen/Context.h>

namespace lamina::devices {

bool is_host(at::Device device) { return device.type() == kHost; }
bool is_host(const at::Tensor& tensor) { return tensor.is_cpu(); }

bool has_streams(at::Device device) { return !is_host(device) && device.type() != at::kMeta; }

at::Tensor on_host(const at::Tensor& tensor) { return tensor.cpu(); }

at::Generator generator(at::Device device) { return at::globalContext().defaultGenerator(device); }

std::string collective_library(at::Device device) { return device.type() == at::kCUDA ? "libnccl.so.2" : ""; }

}  // namespace lamina::devices
