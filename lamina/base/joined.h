// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sstream>
#include <string>
#include <string_view>

namespace lamina::base {

// The elements of a range, one after the other, as operator<< writes them: joined(std::vector{3, 4}) == "3, 4".
template <class Range>
std::string joined(const Range& range, std::string_view between = ", ") {
  std::ostringstream out;
  std::string_view before;
  for (const auto& each : range) {
    out << before << each;
    before = between;
  }
  return out.str();
}

}  // namespace lamina::base
