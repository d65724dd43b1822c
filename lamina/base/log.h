// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace lamina::base {

// Names this process in every later line, as in "[lamina rank 3/8] ...". Empty: "[lamina] ...".
void set_log_name(std::string_view name);

// One line on stderr, written whole. Thread-safe.
void log_warning(std::string_view line);

}  // namespace lamina::base
