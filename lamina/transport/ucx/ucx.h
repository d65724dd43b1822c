// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lamina/device/lending.h"
#include "lamina/transport/transport.h"

namespace lamina::transport {

struct UcxOptions {
  base::Rank rank;
  int size = 1;
  std::string master_addr;
  int master_port = 0;
  std::string configuration;                // must be the same text on all ranks
  std::chrono::seconds join_timeout{300};   // for the slowest rank to start: c10d's figure
  std::chrono::seconds send_timeout{1800};  // for a live peer to take a message
  // A peer without a sign of life for so long is lost, see [Note: silence]; the same on all ranks.
  std::optional<std::chrono::milliseconds> silence;
  std::function<void()> check_interrupt;  // called at least every 200 ms while joining; may throw
  std::optional<devices::Lending> lends;  // the rank's device lends its memory; what open_ucx returns is a Lender
};

// Joins the other ranks and connects to all of them with UCX: shared memory within a machine, its network elsewhere.
// Collective over all ranks; may be called again after close(). Throws as join() does, and base::Error when UCX is not
// there. A world of one rank needs no master address.
std::unique_ptr<Transport> open_ucx(const UcxOptions& options);

}  // namespace lamina::transport
