// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "lamina/device/lending.h"
#include "tests/transport/rank_processes.h"

namespace lamina::transport::testing {

using Lends = std::optional<devices::Lending>;

at::Tensor there(const at::Tensor& tensor);  // on the rank's device
at::Tensor bytes(std::int64_t size, int value);

// Starts two ranks, each with an emulated device of its own. No device is touched before: a fork would not have it.
// `lends`: how they lend their memory; `memory_of_the_second`: its bytes, where it has fewer than usual.
void start_on_devices(RankProcesses& job, const std::array<Lends, 2>& lends, const RankProcesses::Body& body,
                      const char* memory_of_the_second = nullptr);

// The next message's tensor, read as a receiver does.
at::Tensor next(Inbox& inbox);

// Sends copies of these to the other rank and receives its own, each written to right after it was sent, or given away.
// The host waits for nothing.
void exchange(Transport& transport, Inbox& inbox, const std::vector<at::Tensor>& all);

// Kills a rank once `ranks` have reached point 0, and expects the other at point 1 within two seconds.
void expect_to_be_told_of(int killed, RankProcesses& job, int ranks);

}  // namespace lamina::transport::testing
