// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/value/value.h"

namespace lamina::remote {

// Throws base::UsageError where a call of another rank would silently differ from the module's own. This is so inside a
// transform of torch.func, under a dispatch mode or a function mode of Python, and with a tangent of forward-mode AD
// among the arguments. Also where an argument, which is named, holds a device that is neither the host nor the rank's.
void require_can_cross(const std::string& module, const value::Value& arguments);

// Throws base::UsageError where a result, which is named, holds a device that is neither the host nor the rank's.
void require_results_cross(const std::string& module, const value::Value& outputs);

}  // namespace lamina::remote
