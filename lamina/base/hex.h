// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace lamina::base {

// Each byte as two digits.
template <class Bytes>
std::string to_hex(const Bytes& bytes) {
  constexpr auto* kDigits = "0123456789abcdef";
  std::string text;
  for (const auto each : bytes) {
    const auto byte = static_cast<unsigned char>(each);
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

}  // namespace lamina::base
