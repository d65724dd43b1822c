// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/archive/file_system.h"
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
  std::string name;  // of one in dicts: "model.h.0.weight"
  layout::DType dtype = layout::DType::kFloat32;
  layout::Shape shape;
  std::vector<ForeignChunk> chunks;
  std::vector<std::string> also;  // names of the same elements
};

struct ForeignCheckpoint {
  std::vector<ForeignTensor> tensors;
  std::vector<std::string> left;  // names of what is no tensor
};

// The tensors in what torch.save wrote into a part of a file: in a dict, dicts in it, or alone (its name is then "").
// Reads no elements, executes nothing. Throws base::FormatError, which names the file, where it is no such file, names
// anything but tensors and plain values, or has elements that do not lie row by row.
ForeignCheckpoint read_torch_file(FileSystem& files, const Path& path, const Extent* within = nullptr);

// Reads a folder that torch.distributed.checkpoint wrote, `.metadata` and `__*.distcp`, in the same way.
ForeignCheckpoint read_distributed_checkpoint(FileSystem& files, const Path& folder);

}  // namespace lamina::archive
