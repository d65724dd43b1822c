// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/errors.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>

#include "lamina/base/str.h"
#include "lamina/dist/dist.h"

namespace lamina::dist {
namespace {

constexpr std::array<std::string_view, 2> kLate = {"timed out", "timeout"};
constexpr std::array<std::string_view, 6> kLost = {"closed by peer", "reset by peer",  "connection refused",
                                                   "broken pipe",    "connection was", "remote process"};

bool says_any(const std::string& text, const auto& signs) {
  return std::ranges::any_of(signs, [&](const auto sign) { return text.find(sign) != std::string::npos; });
}

}  // namespace

void throw_typed(const std::string& what, const std::exception& error) {
  const std::string said = error.what();
  std::string text = said;
  std::ranges::transform(text, text.begin(), [](unsigned char letter) { return std::tolower(letter); });
  const std::string line =
      base::str("[rank ", get_global_rank(), "/", get_world_size(), "] ", what, ": ", said.substr(0, said.find('\n')));
  if (says_any(text, kLate)) throw base::TimeoutError(line, base::Code{"group-late"});
  if (says_any(text, kLost)) throw base::PeerError(line, std::nullopt, base::Code{"group-lost"});
  throw;
}

}  // namespace lamina::dist
