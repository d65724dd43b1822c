// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/printable.h"

#include <cstddef>
#include <cstdint>

namespace lamina::base {
namespace {

struct Character {
  std::uint32_t code = 0;
  std::size_t bytes = 0;  // 0: no UTF-8
};

// The character that a text begins with.
Character first_of(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i])); };
  const auto lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
  if (bytes == 0 || text.size() < bytes) return {};
  std::uint32_t code = lead & (0x7fU >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0U) != 0x80U) return {};
    code = code << 6U | (byte(i) & 0x3fU);
  }
  constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  return code < kLeast[bytes] || is_surrogate || code > 0x10ffff ? Character{} : Character{code, bytes};
}

bool is_safe(std::uint32_t code, bool one_line) {
  if (code < 0x20) return !one_line && (code == '\n' || code == '\t');
  if (code >= 0x7f && code < 0xa0) return false;       // DEL, and the controls of eight bits
  if (code == 0x2028 || code == 0x2029) return false;  // ends of lines
  const bool turns = code == 0x61c || code == 0x200e || code == 0x200f || (code >= 0x202a && code <= 0x202e) ||
                     (code >= 0x2066 && code <= 0x2069);  // the direction of what follows
  return !turns;
}

std::string made_printable(std::string_view text, bool one_line) {
  constexpr auto* kDigits = "0123456789abcdef";
  std::string shown;
  shown.reserve(text.size());
  while (!text.empty()) {
    const auto [code, bytes] = first_of(text);
    const auto taken = text.substr(0, bytes == 0 ? 1 : bytes);
    if (bytes > 0 && is_safe(code, one_line)) {
      shown += taken;
    } else {
      for (const char each : taken) {
        const auto byte = static_cast<unsigned char>(each);
        shown += {'\\', 'x', kDigits[byte >> 4U], kDigits[byte & 15U]};
      }
    }
    text.remove_prefix(taken.size());
  }
  return shown;
}

}  // namespace

std::string printable(std::string_view text) { return made_printable(text, /*one_line=*/false); }
std::string printable_line(std::string_view text) { return made_printable(text, /*one_line=*/true); }

}  // namespace lamina::base
