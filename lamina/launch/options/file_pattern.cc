// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/file_pattern.h"

#include <map>
#include <regex>
#include <set>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::launch {
namespace {

std::map<std::string, int> values(const Layout& layout, int local_rank) {
  return {{"rank", layout.base_rank + local_rank},
          {"local_rank", local_rank},
          {"world_size", layout.world_size},
          {"node_rank", layout.node_rank},
          {"local_world_size", layout.processes}};
}

}  // namespace

FilePattern::FilePattern(const std::string& text, const std::string& option) {
  static const std::regex field(R"(\{(\w+)(:0?(\d+)d?)?\})");
  auto fail = [&](const std::string& what) {
    throw base::ConfigError(base::str(option, " ", text, ": ", what, "; the fields are {rank}, {local_rank}, ",
                                      "{world_size}, {node_rank}, {local_world_size}"));
  };
  if (text.empty()) fail("a file name is missing");
  for (std::size_t at = 0; at < text.size();) {
    const std::string two = text.substr(at, 2);
    std::smatch match;
    if (two == "{{" || two == "}}") {
      pieces_.push_back({.text = two.substr(1)});
      at += 2;
    } else if (text[at] != '{' && text[at] != '}') {
      pieces_.push_back({.text = text.substr(at++, 1)});
    } else if (std::regex_search(text.begin() + static_cast<std::ptrdiff_t>(at), text.end(), match, field,
                                 std::regex_constants::match_continuous)) {
      if (!values({}, 0).contains(match[1])) fail(base::str("{", match[1].str(), "} is not known"));
      const std::string width = match[3].str();
      pieces_.push_back({.field = match[1], .width = width.empty() ? 0 : std::stoi(width.substr(0, 3))});
      at += static_cast<std::size_t>(match.length());
    } else {
      fail(base::str("the ", text[at], " at character ", at + 1, " begins or ends no field (write it twice)"));
    }
  }
}

std::string FilePattern::name(const Layout& layout, int local_rank) const {
  const auto known = values(layout, local_rank);
  std::string result;
  for (const Piece& piece : pieces_) {
    const std::string text = piece.field.empty() ? piece.text : base::str(known.at(piece.field));
    if (static_cast<int>(text.size()) < piece.width) result.append(piece.width - text.size(), '0');
    result += text;
  }
  return result;
}

bool FilePattern::shared(const Layout& layout) const {
  std::set<std::string> names;
  for (int node = 0; node < layout.nodes; ++node) {
    Layout there = layout;
    there.node_rank = node;
    there.base_rank = node * layout.processes;
    for (int i = 1; i < layout.processes; ++i) {
      if (!names.insert(name(there, i)).second) return true;
    }
  }
  return false;
}

}  // namespace lamina::launch
