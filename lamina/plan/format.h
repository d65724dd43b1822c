// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace lamina::plan {

std::string format_bytes(std::int64_t bytes);           // "812 B", "3.1 MiB"
std::string format_time(double time_us);                // "812 us", "3.1 ms"
std::string format_percent(double part, double whole);  // "52.9 %"

}  // namespace lamina::plan
