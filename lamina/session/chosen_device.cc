// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/chosen_device.h"

#include "lamina/device/rank_device.h"
#include "lamina/environment/environment.h"

namespace lamina::session {

at::Device chosen_device(const std::string& key, int local_rank) {
  const auto named = environment::process_environment()("LAMINA_DEVICE");
  return named.value_or("") != "" ? devices::choose_device(*named, local_rank, "LAMINA_DEVICE")
                                  : devices::choose_device(key, local_rank, "device");
}

}  // namespace lamina::session
