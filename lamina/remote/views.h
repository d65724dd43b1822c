// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "lamina/remote/graph.h"
#include "lamina/value/value.h"

// [Note: views] A module may return a view of an argument: what its caller then writes to one of them is in the other,
// in one process. So the owner says which results are views, and how, and the caller makes them of its own arguments,
// with their history. Where an argument's value is not here, the comparison would fetch it. So the result is then a
// reference like any other, as long as no such call was seen after which its result or argument was written to.
namespace lamina::remote {

// Which of the tensors of `outputs`, in the order of distinct_tensors, are torch's own views of which of `arguments`:
// as bytes. A view that a custom function or a hook gave another gradient is none.
std::string views(const value::Value& outputs, const Tensors& arguments);

// Counts the writes to what shares memory, as it was.
using WriteCounts = std::vector<std::pair<c10::VariableVersion, std::uint32_t>>;

// Puts views of `arguments` in the place of the results of which `views` says so. The views of a pending call stay as
// they are unless `fetches`; then `counts` gets both. Else it gets what shows whether a view was written to.
struct SharedViews {
  WriteCounts counts;
  bool left_apart = false;
};
SharedViews share_views(value::Value& outputs, const std::string& views, const Tensors& arguments, bool fetches);

bool any_written(const WriteCounts& counts);

}  // namespace lamina::remote
