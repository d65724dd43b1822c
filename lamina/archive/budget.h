// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::archive {

// Memory that a parser may take for a file: twice its bytes, and a little. A file that asks for more was made to.
class Budget {
 public:
  Budget(std::uint64_t file_bytes, std::uint64_t little) : all_(2 * file_bytes + little), left_(all_) {}

  // Before memory is taken. Throws base::FormatError where it is too much.
  void take(std::uint64_t bytes) {
    if (bytes > left_) {
      throw base::FormatError(base::str("it would take more than ", all_,
                                        " bytes of memory to read, which no file of its ",
                                        "size does that a program has saved"));
    }
    left_ -= bytes;
  }
  void give_back(std::uint64_t bytes) { left_ += bytes; }

 private:
  const std::uint64_t all_;
  std::uint64_t left_;
};

// How often a text has another one in it, one behind the other.
inline std::uint64_t count_of(std::string_view part, std::string_view text) {
  std::uint64_t count = 0;
  for (auto at = text.find(part); at != std::string_view::npos; at = text.find(part, at + part.size())) ++count;
  return count;
}

// The most bytes between two quotes of a JSON text: a parser has a string several times in memory while it reads it.
inline std::uint64_t longest_string(std::string_view text) {
  std::uint64_t longest = 0;
  std::size_t last = 0;
  for (auto at = text.find('"'); at != std::string_view::npos; at = text.find('"', at + 1)) {
    if (at > 0 && text[at - 1] == '\\') continue;
    longest = std::max<std::uint64_t>(longest, at - last);
    last = at;
  }
  return std::max<std::uint64_t>(longest, text.size() - last);
}

// The most dimensions that a tensor has, in torch and in numpy.
inline constexpr std::size_t kMostDimensions = 64;

}  // namespace lamina::archive
