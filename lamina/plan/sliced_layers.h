// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

namespace lamina::plan {

// Layers of a model that are cut over so many ranks. A plan is then of one of these, and of what it has.
struct SlicedLayers {
  int ranks = 1;
  std::vector<std::pair<std::string, std::string>> layers;  // name and style of each
};

// Reads and writes the "slices" of a plan's file. Throws base::ConfigError that names the field.
SlicedLayers read_sliced_layers(const nlohmann::json& json);
nlohmann::json to_json(const SlicedLayers& sliced);

// A line that says of what a plan is, and one for each style, with the names that have it; empty without other ranks.
// Names that differ in numbers alone are one, with how many there are. Ends with a newline.
std::string describe(const SlicedLayers& sliced);

}  // namespace lamina::plan
