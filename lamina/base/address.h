// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace lamina::base {

// The scheme of an address of a store, such as "s3" of "s3://bucket/folder"; empty for a path.
inline std::string scheme_of(std::string_view text) {
  const auto end = text.find("://");
  const auto scheme = text.substr(0, end == std::string_view::npos ? 0 : end);
  const auto letter = [](char each) { return (each >= 'a' && each <= 'z') || (each >= 'A' && each <= 'Z'); };
  const auto fits = [&](char each) {
    return letter(each) || (each >= '0' && each <= '9') || each == '+' || each == '-' || each == '.';
  };
  const bool is_one = !scheme.empty() && letter(scheme.front()) && std::all_of(scheme.begin(), scheme.end(), fits);
  return is_one ? std::string(scheme) : "";
}

}  // namespace lamina::base
