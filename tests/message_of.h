// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

namespace lamina {

// The words of the error of this type that a call throws; any other one goes on.
template <class Thrown>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Thrown& error) {
    return error.what();
  }
  return "nothing was thrown";
}

}  // namespace lamina
