// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

#include "lamina/base/str.h"

// [Note: roles] Ranks have devices with other numbers, so a device travels as what it is to a rank: the host, or the
// rank's own. On arrival it is the receiver's.
namespace lamina::devices {

enum class Role : std::uint8_t { kHost, kRanks };

// None for a device that is neither.
std::optional<Role> known_role(at::Device device);
at::Device device_of(Role role);

// Throws base::UsageError: `what`, such as "a tensor on cuda:1", cannot go to a rank.
[[noreturn]] void refuse_device(const std::string& what);

// Refuses a device that is neither, as `what`, whose parts are joined only then.
template <typename... Parts>
Role role_of(at::Device device, const Parts&... what) {
  const auto role = known_role(device);
  if (!role) refuse_device(base::str(what...));
  return *role;
}

// The role that somebody sent. Throws base::FormatError for none of them.
Role read_role(std::uint8_t sent);

}  // namespace lamina::devices
