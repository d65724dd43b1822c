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

}  // namespace lamina::model
