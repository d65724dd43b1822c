// SPDX-License-Identifier: Apache-2.0
#include "lamina/topology/placement.h"

#include <algorithm>
#include <string>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::topology {
namespace {

Axis axis_of(char letter) { return letter == 'P' ? Axis::kPipeline : letter == 'T' ? Axis::kTensor : Axis::kReplica; }

}  // namespace

AxisOrder parse_placement(std::string_view strategy) {
  const std::string letters(strategy == "cluster" ? "DPT" : strategy == "spread" ? "TPD" : strategy);
  std::string sorted = letters;
  std::sort(sorted.begin(), sorted.end());
  if (sorted != "DPT") {
    throw base::ConfigError(base::str("placement_strategy: \"", strategy, "\" is not allowed; expected \"cluster\", ",
                                      "\"spread\" or the letters D, P and T in any order"));
  }
  return {axis_of(letters[0]), axis_of(letters[1]), axis_of(letters[2])};
}

}  // namespace lamina::topology
