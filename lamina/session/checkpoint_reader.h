// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/archive/store.h"
#include "lamina/checkpoint/piece_reader.h"
#include "lamina/session/checkpoint_parts.h"
#include "lamina/session/parts_to_save.h"
#include "lamina/value/value.h"

namespace lamina::session {

// A checkpoint to be loaded: its folder, and the id of its save, which a whole model of others has none of.
struct FoundCheckpoint {
  std::filesystem::path folder;
  std::string id;
};

// Finds the one of a tag in a folder of checkpoints, or the newest of that form; a whole model may be one of others,
// and lie in the folder itself. None where there is none. Throws as archive::Store does.
std::optional<FoundCheckpoint> find_checkpoint(const std::filesystem::path& folder,
                                               const std::optional<std::string>& tag, archive::Store::Form form,
                                               const std::function<void(const std::string&)>& tells);

// A tensor of a model's state, with all its names.
using NamesOf = std::pair<std::vector<std::string>, at::Tensor>;

// A checkpoint that is read into a job: what this rank wants of it is listed first, and then read at once.
class CheckpointReader {
 public:
  // Throws base::FormatError, or base::FileError, where the folder is no whole checkpoint.
  CheckpointReader(const std::filesystem::path& place, bool verify);

  const archive::Manifest& manifest() const { return reader_.manifest(); }
  // Gives what it tells about itself under a key; none where it does not. Throws as checkpoint::to_value() does.
  value::Value about(const std::string& key, bool allow_objects) const;
  // nullptr where there is none.
  const archive::SavedTensor* find(const std::string& name, archive::Kind kind, int optimizer = 0,
                                   const std::string& state = "") const {
    return reader_.find(name, kind, optimizer, state);
  }
  // The first of a tensor's names under which its value is there; nullptr for none.
  const std::string* saved_name(const std::vector<std::string>& names) const;

  // Compares a model with it. Throws base::UsageError for another shape, a dtype of another kind and, where it is
  // `strict`, other names. Returns what is left out else: a line, or "".
  std::string check_model(const std::vector<NamesOf>& model, bool strict) const;
  // Says where a parameter of this dtype has its value from: the master of an optimizer, where there is one, and the
  // parameter here is more precise than the one that was saved.
  std::pair<archive::Kind, int> best_source(const std::string& name, at::ScalarType dtype) const;

  // Memory that read() fills with this rank's elements. Throw base::UsageError where the whole has another shape.
  at::Tensor want_row(const CheckpointParts& parts, const std::string& name, archive::Kind from, int optimizer);
  at::Tensor want_state(const CheckpointParts& parts, const OptimizerSteps& steps, const StateName& of,
                        const at::Tensor& place, archive::Kind from);
  at::Tensor want_content(const std::string& name);  // undefined where there is none
  at::Tensor whole(const std::string& name) const;   // of the model, at once
  // Throws as checkpoint::PieceReader does, and what an interrupt of the session's waits throws.
  void read(const Session& session);

 private:
  at::Tensor want(const std::string& name, archive::Kind kind, int optimizer, const std::string& state,
                  const layout::Region& region);

  checkpoint::PieceReader reader_;
  std::vector<checkpoint::Wanted> wanted_;
};

}  // namespace lamina::session
