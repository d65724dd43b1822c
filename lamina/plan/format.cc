// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/format.h"

#include <array>
#include <iomanip>
#include <span>

#include "lamina/base/str.h"

namespace lamina::plan {
namespace {

std::string scaled(double value, double step, std::span<const char* const> units, int digits_of_first) {
  std::size_t unit = 0;
  for (; value >= step && unit + 1 < units.size(); ++unit) value /= step;
  return base::str(std::fixed, std::setprecision(unit == 0 ? digits_of_first : 1), value, " ", units[unit]);
}

}  // namespace

std::string format_bytes(std::int64_t bytes) {
  constexpr std::array kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  return scaled(static_cast<double>(bytes), 1024, kUnits, 0);
}

std::string format_time(double time_us) {
  constexpr std::array kUnits{"us", "ms", "s"};
  return scaled(time_us, 1000, kUnits, 1);
}

std::string format_percent(double part, double whole) {
  return base::str(std::fixed, std::setprecision(1), whole > 0 ? 100 * part / whole : 0.0, " %");
}

}  // namespace lamina::plan
