// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/role.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"

namespace lamina::devices {

std::optional<Role> known_role(at::Device device) {
  if (is_host(device)) return Role::kHost;
  const auto own = rank_device();
  const bool current = !device.has_index() && device.type() == own.type();  // "cuda" is the one in use
  if (device == own || current) return Role::kRanks;
  return std::nullopt;
}

void refuse_device(const std::string& what) {
  const auto own = rank_device();
  const auto ranks = is_host(own) ? std::string("which is the host") : base::str("the host or ", own);
  throw base::UsageError(base::str(what, " cannot go to another rank: it has to be on the rank's device, ", ranks,
                                   "; move it there, or name the device in init (the key `device`)"),
                         base::Code{"step-cannot-travel"});
}

at::Device device_of(Role role) { return role == Role::kHost ? at::Device(kHost) : rank_device(); }

Role read_role(std::uint8_t sent) {
  if (sent > static_cast<std::uint8_t>(Role::kRanks)) throw base::FormatError("an unknown role of a device");
  return static_cast<Role>(sent);
}

}  // namespace lamina::devices
