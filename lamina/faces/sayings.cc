// SPDX-License-Identifier: Apache-2.0
#include "lamina/faces/sayings.h"

namespace lamina::faces {

std::string fill(std::string_view text, const std::vector<std::string>& values) {
  constexpr std::string_view kPlace = "{}";
  std::string filled;
  auto place = text.find(kPlace);
  for (const auto& value : values) {
    base::internal_check(place != std::string_view::npos, "a value that a text has no place for");
    filled.append(text.substr(0, place)).append(value);
    text.remove_prefix(place + kPlace.size());
    place = text.find(kPlace);
  }
  base::internal_check(place == std::string_view::npos, "a text that lacks a value");
  return filled.append(text);
}

}  // namespace lamina::faces
