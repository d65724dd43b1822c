// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

#include "lamina/base/ids.h"

namespace lamina::messaging {

// Turns an error into text that crosses ranks, and back into an error of the same class, with the rank on which it was.
std::string to_text(const std::exception_ptr& error, base::Rank rank);
std::exception_ptr to_error(const std::string& text);

}  // namespace lamina::messaging
