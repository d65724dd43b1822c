// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

#include "lamina/base/ids.h"

namespace lamina::messaging {

// An error as text that crosses ranks, and back as an error of the same class, which says on which rank it was.
std::string to_text(const std::exception_ptr& error, base::Rank rank);
std::exception_ptr to_error(const std::string& text);

}  // namespace lamina::messaging
