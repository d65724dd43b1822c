// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "lamina/foreign/torch_file.h"
#include "lamina/layout/parameter_layout.h"

namespace lamina::foreign {

// The module whose extra state has that name in a state dict, "" for the root; none for a name of something else.
std::optional<std::string> module_of_extra(const std::string& name);

// Parameters and buffers in the files of a partial checkpoint, each under all of its names. Files of several partitions
// may have one tensor, under other names where it is tied; files of several slices have their parts of it.
class SmpModel {
 public:
  // Its tensors are added to those of `found`, which outlives it, and extra states that are tensors to its content.
  explicit SmpModel(ForeignCheckpoint& found) : found_(found) {}

  // Takes how tensors are cut: {name: [dimension, [[extent, unit], ...]]}.
  void read_slicings(const nlohmann::json& cuts, int degree);
  bool has_slices() const { return !slicings_.empty(); }
  // How the tensor is cut that has one of these names; nullptr where it is whole.
  const layout::Slicing* slicing_of(const archive::SavedTensor& tensor) const;

  // Adds what a file of that slice has. Throws base::FormatError where other files have it in another shape or dtype.
  void add(archive::SavedTensor tensor, int slice);
  // Calls those buffers that the list names.
  void name_buffers(const nlohmann::json* names);
  // nullptr where there is none.
  const archive::SavedTensor* find(std::string_view name) const;
  [[noreturn]] void refuse_slice(const archive::SavedTensor& tensor, int slice) const;

  // Takes the elements of a parameter that were cut out of a flat tensor: it becomes the parameter where the files have
  // none, or another shape of it. Else it is given back, where its dtype is another one: the parameter's master.
  std::optional<archive::SavedTensor> add_flat(const std::string& name, archive::SavedTensor tensor);
  // The model's file has something without elements for parameters that are sharded: leaves those that were not `cut`
  // out of flat tensors, which are tied ones, or frozen.
  void leave_placeholders(const std::set<std::string>& cut);

 private:
  void add_whole(archive::SavedTensor tensor);
  void add_of_slice(const archive::SavedTensor& tensor, const layout::Slicing& slicing, int slice);
  std::string file_of(const archive::SavedTensor& tensor) const;

  ForeignCheckpoint& found_;
  std::map<std::string, std::size_t, std::less<>> names_;  // of its tensors among those found
  std::map<std::string, layout::Slicing> slicings_;
  std::uint64_t contents_ = 0;  // tensors that are no parameters or buffers
};

}  // namespace lamina::foreign
