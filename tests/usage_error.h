// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "lamina/base/error.h"

namespace lamina {

// The words of the base::UsageError that a call throws; "" if it throws none.
inline std::string usage_error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const base::UsageError& error) {
    return error.what();
  }
  return "";
}

}  // namespace lamina
