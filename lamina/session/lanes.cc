// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/lanes.h"

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"

namespace lamina::session {

std::optional<devices::Lending> asked_lending(const environment::Environment& environment) {
  const auto asked = environment("LAMINA_LANES").value_or("");
  if (asked != "" && asked != "0" && asked != "1") {
    throw base::ConfigError(base::str("LAMINA_LANES: \"", asked,
                                      "\" is not allowed; expected 1, for values that go from device to device, or 0"));
  }
  const auto device = devices::rank_device();
  if (asked != "1" || devices::is_host(device)) return std::nullopt;
  auto lends = devices::lending_of(device);
  if (!lends) {
    base::log_warning(base::str("LAMINA_LANES=1: devices of type ", c10::DeviceTypeName(device.type(), true),
                                " lend no memory, so their tensors go through the host"));
  }
  return lends;
}

}  // namespace lamina::session
