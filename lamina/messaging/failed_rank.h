// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/transport/transport.h"

namespace lamina::messaging {

inline constexpr transport::Kind kFailedRank = "failed";  // the sender's part in the job is over

// Says to all ranks, this one included, that this one is lost, and why, a clause: "its device failed". They take it as
// they take the end of its process, and do not wait for that. From any thread; waits for nobody.
void tell_failed(transport::Transport& transport, const std::string& why);

}  // namespace lamina::messaging
