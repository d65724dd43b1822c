// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::command {

// `lamina explain CODE`: what the page on errors says of a code or a type of errors.
int explain(const std::vector<std::string>& arguments);

}  // namespace lamina::command
