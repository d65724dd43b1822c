// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/rank_list.h"

#include "lamina/base/str.h"

namespace lamina::base {

std::string name_ranks(const std::vector<Rank>& ranks) {
  std::string result = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1].value == ranks[last].value + 1) ++last;
    result += str(i > 0 ? ", " : "", ranks[i]);
    if (last > i) result += str(last > i + 1 ? "-" : ", ", ranks[last]);
    i = last + 1;
  }
  return result;
}

std::string without(const std::vector<Rank>& absent) {
  if (absent.empty()) return "";
  return str(" without ", name_ranks(absent), absent.size() == 1 ? ", which has" : ", which have", " not come");
}

}  // namespace lamina::base
