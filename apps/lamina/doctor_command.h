// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::command {

// `lamina doctor`: facts of this machine and its libraries, and whether two ranks work here.
int doctor(const std::vector<std::string>& arguments);

}  // namespace lamina::command
