// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace lamina::base {

// Names this process in every later line, as in "[lamina rank 3/8] ...". Empty: "[lamina] ...".
void set_log_name(std::string_view name);

// How much this process says on stderr beside errors. LAMINA_LOG names a level: "error", "warning", "info" or "debug";
// info if it is not set. Another word counts as info, and is told.
enum class Level { kError, kWarning, kInfo, kDebug };
bool says(Level level);

// One line on stderr, written whole, unless LAMINA_LOG is "error". Thread-safe.
void log_warning(std::string_view line);
// Does so for whoever started the job, unless LAMINA_LOG asks for less than "info".
void log_info(std::string_view line);

}  // namespace lamina::base
