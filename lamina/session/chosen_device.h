// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace lamina::session {

// The device that the key `device` chooses for a rank of this process; LAMINA_DEVICE counts instead, where it is set.
// Throws base::ConfigError, which says what there is.
at::Device chosen_device(const std::string& key, int local_rank);

}  // namespace lamina::session
