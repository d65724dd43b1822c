// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lamina/archive/file_system.h"
#include "lamina/archive/manifest.h"
#include "lamina/foreign/zip_file.h"
#include "lamina/layout/dtype.h"
#include "lamina/layout/region.h"

namespace lamina::foreign {

// A value that is no tensor.
struct ForeignValue {
  std::string name;
  std::optional<nlohmann::json> plain;  // as a checkpoint's `about` has it; none of an object
};

// Others' checkpoint: as a manifest without checksums has it, for PieceReader, with values that are no tensors.
struct ForeignCheckpoint : archive::Manifest {
  archive::Path folder;  // of the files
  std::vector<ForeignValue> left;
  std::optional<nlohmann::json> plain_root;  // all that a file holds, where that is plain

  const archive::SavedTensor* find(std::string_view tensor) const;
  const nlohmann::json* plain(std::string_view value) const;  // that is left; nullptr where there is none
};

// Names that a file's pickle may have. Nothing is executed either way.
enum class Names {
  kOfTensors,  // tensors, sizes and dicts
  kAny         // of any class: values of it are left
};

// The tensors in what torch.save wrote into a part of a file: in a dict, dicts and lists in it, or alone (its name is
// then that of the options). Executes nothing, and reads no elements but to verify or to gather them. Throws
// base::FormatError, which names the file, where it is no such file or names what it may not.
struct TorchFileOptions {
  std::string name = {};              // of a tensor or a value that stands alone, and before those in dicts
  std::optional<Extent> within = {};  // of the file; none: all of it
  Names names = Names::kOfTensors;
  // Reads tensors that do not lie row by row, such as transposed ones, into memory; else they are an error.
  bool gather = false;
  // Compares names, and this share of the tensors, with the checksums in the file: base::FormatError names a tensor.
  std::optional<archive::Share> verify = {};
};
ForeignCheckpoint read_torch_file(archive::FileSystem& files, const archive::Path& path,
                                  const TorchFileOptions& options = {});

// Reads a folder that torch.distributed.checkpoint wrote, `.metadata` and `__*.distcp`, in the same way.
ForeignCheckpoint read_distributed_checkpoint(archive::FileSystem& files, const archive::Path& folder,
                                              std::optional<archive::Share> verify = {});

// Reads a partial checkpoint in the form of smdistributed.modelparallel, `model_*.pt` and what is beside them, in the
// same way: parameters, buffers, masters, and states and options of the optimizer. Where these do not go by the names
// of parameters, `about` says so in "no_optimizer". Parts that ranks have of one tensor are put together. Where lamina
// saved it, the layout, the partition and checksums are those of the manifest beside the files. base::FormatError where
// the file of a rank is missing.
ForeignCheckpoint read_smp_checkpoint(archive::FileSystem& files, const archive::Path& folder,
                                      std::optional<archive::Share> verify = {});

// True for such a folder.
bool is_smp_checkpoint(archive::FileSystem& files, const archive::Path& folder);

// Finds the folder that the original's calls mean by a path and a tag: TAG_partial, or without a tag the one that
// the file `newest` names, or the path itself. None where there is none.
std::optional<archive::Path> find_smp_checkpoint(archive::FileSystem& files, const archive::Path& folder,
                                                 const std::optional<std::string>& tag);

}  // namespace lamina::foreign
