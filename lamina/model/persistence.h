// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "lamina/config/config.h"

namespace lamina::model {

// Says whether the elements of a parameter may be shared out: of floating-point numbers, contiguous, and no scalar,
// whose states nothing would tell from other numbers. The configuration leaves small ones whole, and those that it
// names.
bool may_be_sharded(std::string_view name, const at::Tensor& parameter, const config::Config& config);

// Says whether an entry of `sdp_persistent_parameters` is the name of a parameter, or of a module that it is in.
bool is_named_by(std::string_view entry, std::string_view parameter);

}  // namespace lamina::model
