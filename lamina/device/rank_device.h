// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace lamina::devices {

// The device that this process's rank computes on: the host, until a job has chosen another.
at::Device rank_device();

// The device that somebody asks for by "auto", "cpu", "gpu", a type or type:index. "gpu" is the accelerator of any
// type, "auto" is that, too, if this machine has one. Without an index it is the one that the program has made current,
// else that of the rank's number on its machine, modulo the number of devices. Throws base::ConfigError, which begins
// with `source`, for a type that is not here and an index beyond the last.
at::Device choose_device(const std::string& asked, int local_rank, const std::string& source);

// The rank computes there from now on, and so does this thread.
void set_rank_device(at::Device device);

// The devices of this machine, as "cpu, cuda:0 to cuda:3".
std::string devices_here();

}  // namespace lamina::devices
