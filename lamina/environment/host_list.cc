// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <memory>
#include <string>

#include "lamina/base/str.h"
#include "lamina/environment/cluster_task.h"

namespace lamina::environment {
namespace {

using Hosts = std::vector<std::string>;

// The text up to the first comma outside of brackets; takes it, and the comma, away.
std::string_view next_item(std::string_view& list) {
  int depth = 0;
  std::size_t end = 0;
  for (; end < list.size() && (depth > 0 || list[end] != ','); ++end) {
    if (list[end] == '[') ++depth;
    if (list[end] == ']') --depth;
  }
  const auto item = list.substr(0, end);
  list.remove_prefix(std::min(list.size(), end + 1));
  return item;
}

// "08-10" is 08, 09, 10; "7" is 7.
Hosts numbers(std::string_view range, std::size_t limit) {
  const auto dash = range.find('-');
  if (dash == std::string_view::npos) return {std::string(range)};
  long first = 0;
  long last = -1;
  const char* const begin = std::to_address(range.begin());
  std::from_chars(begin, begin + dash, first);
  std::from_chars(begin + dash + 1, begin + range.size(), last);
  Hosts result;
  for (long number = first; number <= last && result.size() < limit; ++number) {
    std::string text = std::to_string(number);
    if (text.size() < dash) text.insert(0, dash - text.size(), '0');
    result.push_back(std::move(text));
  }
  return result;
}

// Expands the first bracket of one item, and what follows it.
Hosts expand_item(std::string_view item, std::size_t limit) {
  const auto open = item.find('[');
  const auto close = item.find(']', open == std::string_view::npos ? 0 : open);
  if (open == std::string_view::npos || close == std::string_view::npos) return {std::string(item)};
  const Hosts tails = expand_item(item.substr(close + 1), limit);
  std::string_view ranges = item.substr(open + 1, close - open - 1);
  Hosts result;
  while (!ranges.empty() && result.size() < limit) {
    for (const auto& number : numbers(next_item(ranges), limit)) {
      for (const auto& tail : tails) result.push_back(base::str(item.substr(0, open), number, tail));
    }
  }
  return result;
}

}  // namespace

Hosts expand_hosts(std::string_view list, std::size_t limit) {
  Hosts hosts;
  while (!list.empty() && hosts.size() < limit) {
    const auto item = next_item(list);
    if (item.empty()) continue;
    for (auto& host : expand_item(item, limit)) hosts.push_back(std::move(host));
  }
  if (hosts.size() > limit) hosts.resize(limit);
  return hosts;
}

}  // namespace lamina::environment
