// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "lamina/base/error.h"

namespace lamina::value {

// Returns what `use` says when it fails with an Error.
template <class Error = base::UsageError>
std::string refusal(const std::function<void()>& use) {
  try {
    use();
  } catch (const Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

}  // namespace lamina::value
