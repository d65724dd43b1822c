// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/smp_states.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/foreign/tensor_parts.h"

namespace lamina::foreign {

using archive::Path;
using archive::SavedTensor;

// Parts of slices are kept apart; of what is not sliced each rank of a slice has the same.
void SmpStates::add(SavedTensor tensor, int slice) {
  const Name name(tensor.name, tensor.state);
  const auto* parameter = model_.find(tensor.name);
  if (parameter != nullptr && model_.slicing_of(*parameter) != nullptr) {
    slices_[name][slice].push_back(std::move(tensor));
  } else if (!model_.has_slices() || slice == 0) {
    parts_[name].push_back(std::move(tensor));
  }
}

void SmpStates::finish(ForeignCheckpoint& found, const std::set<std::string, std::less<>>& outside) {
  add_sliced(found);
  for (auto& [name, parts] : parts_) {
    const auto& [of, state] = name;
    const auto* parameter = model_.find(of);
    if (parameter == nullptr && outside.contains(of) && !state.empty()) {
      found.tensors.push_back(std::move(parts.front()));
    } else if (parameter == nullptr) {
      found.left.push_back({base::str(of, ".", state.empty() ? "master" : state), std::nullopt});
    } else {
      auto whole = together(name, std::move(parts), *parameter, found.folder);
      found.tensors.push_back(std::move(whole));
    }
  }
}

// They are cut as their parameters are, or whole on one rank.
void SmpStates::add_sliced(ForeignCheckpoint& found) {
  for (auto& [name, by_slice] : slices_) {
    const auto parameter = *model_.find(name.first);
    const auto& slicing = *model_.slicing_of(parameter);
    auto whole = by_slice.begin()->second.front();
    const auto first = whole;
    whole.name = parameter.name;
    whole.shape = parameter.shape;
    whole.pieces.clear();
    bool fits = std::ssize(by_slice) == slicing.degree;
    for (const auto& [slice, parts] : by_slice) fits = fits && add_slice(whole, slicing, slice, parts);
    const bool is_like = !first.shape.empty() && first.shape.size() == parameter.shape.size();
    if (!fits && (name.second.empty() || (is_like && by_slice.size() > 1))) model_.refuse_slice(first, 0);
    auto& added = found.tensors.emplace_back(fits ? whole : first);
    added.name = parameter.name;
  }
}

SavedTensor SmpStates::together(const Name& name, std::vector<SavedTensor> parts, const SavedTensor& parameter,
                                const Path& folder) const {
  std::int64_t all = 0;
  for (const auto& part : parts) all += part.shape.size() == 1 ? part.shape[0] : 0;
  const auto count = layout::numel(parameter.shape);
  const bool is_master = name.second.empty();
  const bool in_parts = parts.front().shape != parameter.shape && (parts.size() > 1 || is_master) &&
                        std::ranges::all_of(parts, [](const auto& part) { return part.shape.size() == 1; });
  if (in_parts && (all < count || all - count >= std::ssize(parts))) {
    throw base::FormatError(base::str(folder.string(), ": the ranks' parts of ", is_master ? "master" : name.second,
                                      " of ", name.first, " have ", all, " elements, and it has ", count,
                                      ": the optimizer's file of a rank is missing, or another job's"));
  }
  auto tensor = in_parts ? joined(parts, parameter.shape) : std::move(parts.front());
  tensor.name = parameter.name;
  return tensor;
}

}  // namespace lamina::foreign
