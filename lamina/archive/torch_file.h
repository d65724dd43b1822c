// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lamina/archive/file_system.h"
#include "lamina/archive/manifest.h"
#include "lamina/archive/zip_file.h"
#include "lamina/layout/dtype.h"
#include "lamina/layout/region.h"

namespace lamina::archive {

// A box of a tensor, row by row, in a file of others.
struct ForeignChunk {
  Path path;
  std::uint64_t begin = 0;       // in the file
  layout::Shape offsets, sizes;  // of the box
};

struct ForeignTensor {
  std::string name;  // of one in dicts: "model.h.0.weight"; of a master or a state that of its parameter
  Kind kind = Kind::kParameter;
  int optimizer = 0;  // of masters and states
  std::string state;  // "exp_avg"
  layout::DType dtype = layout::DType::kFloat32;
  layout::Shape shape;
  std::vector<ForeignChunk> chunks;
  bool is_flat = false;           // the boxes are of its elements in one dimension
  std::vector<std::string> also;  // names of the same elements
  std::vector<std::byte> value;   // in the place of boxes: of a number that lies in no file as an element
};

// A value that is no tensor.
struct ForeignValue {
  std::string name;
  std::optional<nlohmann::json> plain;  // as a checkpoint's `about` has it; none of an object
};

struct ForeignCheckpoint {
  std::vector<ForeignTensor> tensors;
  std::vector<ForeignValue> left;
  nlohmann::json about = nlohmann::json::object();  // what a checkpoint says beside its tensors: see Manifest

  const ForeignTensor* find(std::string_view name) const;
  const nlohmann::json* plain(std::string_view name) const;  // a value that is left; nullptr where there is none
};

// Names that a file's pickle may have. Nothing is executed either way.
enum class Names {
  kOfTensors,  // tensors, sizes and dicts
  kAny         // of any class: values of it are left
};

// The tensors in what torch.save wrote into a part of a file: in a dict, dicts and lists in it, or alone (its name is
// then that of the options). Reads no elements but to verify them, executes nothing. Throws base::FormatError, which
// names the file, where it is no such file, names what it may not, or has elements that do not lie row by row.
struct TorchFileOptions {
  std::string name = {};              // of a tensor or a value that stands alone, and before those in dicts
  std::optional<Extent> within = {};  // of the file; none: all of it
  Names names = Names::kOfTensors;
  bool verify = false;  // reads all, and compares it with the checksums in the file: base::FormatError names a tensor
};
ForeignCheckpoint read_torch_file(FileSystem& files, const Path& path, const TorchFileOptions& options = {});

// Reads a folder that torch.distributed.checkpoint wrote, `.metadata` and `__*.distcp`, in the same way.
ForeignCheckpoint read_distributed_checkpoint(FileSystem& files, const Path& folder, bool verify = false);

// Reads a partial checkpoint of smdistributed.modelparallel, `model_*.pt` and what is beside them, in the same way:
// parameters, buffers, masters, and states and options of the optimizer where these go by the names of parameters.
// Parts that ranks have of one tensor are put together.
ForeignCheckpoint read_smp_checkpoint(FileSystem& files, const Path& folder, bool verify = false);

// True for such a folder.
bool is_smp_checkpoint(FileSystem& files, const Path& folder);

}  // namespace lamina::archive
