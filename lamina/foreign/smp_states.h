// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lamina/foreign/smp_model.h"

namespace lamina::foreign {

// States and masters of parameters in the files of a partial checkpoint, of which ranks may have parts.
class SmpStates {
 public:
  // `model` outlives it.
  explicit SmpStates(const SmpModel& model) : model_(model) {}

  // Takes what a file of that slice has of a parameter's master, or of a state of it.
  void add(archive::SavedTensor tensor, int slice);
  bool has_master(const std::string& parameter) const { return parts_.contains({parameter, ""}); }
  // Adds them to `found`, put together. `outside`: parameters of the optimizer that the model has not, whose states
  // each rank has whole. Throws base::FormatError where parts are missing.
  void finish(ForeignCheckpoint& found, const std::set<std::string, std::less<>>& outside);

 private:
  using Name = std::pair<std::string, std::string>;  // of the parameter and of its state; "": its master
  void add_sliced(ForeignCheckpoint& found);
  archive::SavedTensor together(const Name& name, std::vector<archive::SavedTensor> parts,
                                const archive::SavedTensor& parameter, const archive::Path& folder) const;

  const SmpModel& model_;
  std::map<Name, std::vector<archive::SavedTensor>> parts_;
  std::map<Name, std::map<int, std::vector<archive::SavedTensor>>> slices_;  // of sliced parameters
};

}  // namespace lamina::foreign
