// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/persistence.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "lamina/base/module_names.h"

namespace lamina::model {

bool may_be_sharded(std::string_view name, const at::Tensor& parameter, const config::Config& config) {
  const auto names_it = [&](const std::string& entry) { return base::is_in_module(name, entry); };
  const auto& persistent = config.sdp_persistent_parameters;
  return parameter.is_floating_point() && parameter.is_contiguous() && parameter.dim() > 0 &&
         parameter.numel() >= std::max<std::int64_t>(config.sdp_param_persistence_threshold, 1) &&
         !(persistent && std::ranges::any_of(*persistent, names_it));
}

}  // namespace lamina::model
