// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/sliced_layers.h"

#include <algorithm>

#include "lamina/base/json_text.h"
#include "lamina/base/name_pattern.h"
#include "lamina/base/str.h"
#include "lamina/config/json_reader.h"

namespace lamina::plan {
namespace {

using base::Json;

constexpr std::int64_t kMostRanks = 65'536;

// Elements with a count or a list each, in the order in which they first came.
template <class Value>
Value& entry(std::vector<std::pair<std::string, Value>>& all, const std::string& key) {
  const auto found = std::ranges::find(all, key, &std::pair<std::string, Value>::first);
  return found != all.end() ? found->second : all.emplace_back(key, Value()).second;
}

}  // namespace

SlicedLayers read_sliced_layers(const Json& json) {
  config::JsonReader reader(json, "slices");
  SlicedLayers sliced;
  sliced.ranks = static_cast<int>(reader.integer("ranks", 1, kMostRanks));
  for (const Json& row : reader.list("layers")) {
    if (!row.is_array() || row.size() != 2 || !row[0].is_string() || !row[1].is_string()) {
      reader.refuse("layers", base::str(row.dump(), " is not [name, style]"));
    }
    sliced.layers.emplace_back(row[0].get<std::string>(), row[1].get<std::string>());
  }
  reader.finish();
  return sliced;
}

Json to_json(const SlicedLayers& sliced) { return {{"ranks", sliced.ranks}, {"layers", sliced.layers}}; }

std::string describe(const SlicedLayers& sliced) {
  if (sliced.ranks == 1) return "";
  std::vector<std::pair<std::string, std::vector<std::pair<std::string, int>>>> styles;
  for (const auto& [name, style] : sliced.layers) ++entry(entry(styles, style), base::as_pattern(name));
  std::string text =
      base::str("each line is of one of the ", sliced.ranks,
                " ranks of a TP_GROUP, which have slices of layers; times have their exchanges in them\n");
  for (const auto& [style, names] : styles) {
    std::string line;
    for (const auto& [name, count] : names) {
      line += base::str(line.empty() ? "" : ", ", name, count > 1 ? base::str(" (", count, ")") : "");
    }
    text += base::str("  ", style, ": ", line, "\n");
  }
  return text;
}

}  // namespace lamina::plan
