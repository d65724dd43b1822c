// SPDX-License-Identifier: Apache-2.0
#include "lamina/membership/witness_words.h"

#include <algorithm>
#include <charconv>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::membership {

std::string question(std::int64_t session, const EpochWord& word) { return base::str(session, ' ', word.to_text()); }

std::pair<std::int64_t, EpochWord> read_question(const std::string& text) {
  const auto space = text.find(' ');
  std::int64_t session = 0;
  const auto* const end = text.data() + std::min(space, text.size());
  const auto read = std::from_chars(text.data(), end, session);
  if (space == std::string::npos || read.ptr != end) throw base::FormatError("no question to a witness");
  return {session, EpochWord::read(text.substr(space + 1))};
}

std::string refusal(const std::string& why) { return "!" + why; }
bool is_refusal(const std::string& text) { return text.starts_with('!'); }
std::string refusal_in(const std::string& text) { return text.substr(1); }

}  // namespace lamina::membership
