// SPDX-License-Identifier: Apache-2.0
// The metadata of torch.distributed.checkpoint: a pickle of its classes (torch/distributed/checkpoint/metadata.py).
#include <algorithm>
#include <map>

#include "lamina/archive/foreign_states.h"
#include "lamina/archive/pickle.h"
#include "lamina/archive/torch_dtype.h"
#include "lamina/archive/torch_file.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::archive {
namespace {

using Type = PickleValue::Type;

constexpr std::uint64_t kMostMetadataBytes = std::uint64_t{1} << 30;

bool in_metadata(std::string_view global) {
  constexpr std::string_view kMetadata = "torch.distributed.checkpoint.metadata.";
  constexpr std::string_view kClasses[] = {
      "Metadata",      "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
      "MetadataIndex", "_MEM_FORMAT_ENCODING",  "StorageMeta"};
  constexpr std::string_view kOthers[] = {"torch.distributed.checkpoint.filesystem._StorageInfo",
                                          "torch.serialization._get_layout",
                                          "torch.Size",
                                          "collections.OrderedDict",
                                          "pathlib.PosixPath",
                                          "pathlib._local.PosixPath"};
  if (std::ranges::find(kOthers, global) != std::end(kOthers) || dtype_of(global)) return true;
  return global.starts_with(kMetadata) &&
         std::ranges::find(kClasses, global.substr(kMetadata.size())) != std::end(kClasses);
}

const PickleValue& attribute(const PickleValue& object, const char* name, Type type) {
  const auto* found = object.find(name);
  if (found == nullptr || !found->is(type)) throw base::FormatError(base::str("its metadata has no ", name));
  return *found;
}

layout::Shape shape_in(const PickleValue& object, const char* name) {
  const auto* found = object.find(name);
  const auto shape = found != nullptr ? shape_of(*found) : std::nullopt;
  if (!shape) throw base::FormatError(base::str("its metadata has no ", name));
  return *shape;
}

struct Stored {
  std::string file;
  Extent extent;
};
struct Places {
  std::map<std::pair<std::string, layout::Shape>, Stored> boxes;  // of tensors
  std::map<std::string, Stored> values;                           // of what is no tensor
};

Places places_of(const PickleValue& metadata) {
  Places places;
  const auto& all = attribute(metadata, "storage_data", Type::kDict);
  for (std::size_t i = 0; i + 1 < all.items.size(); i += 2) {
    const auto &index = *all.items[i], &info = *all.items[i + 1];
    const auto* offset = index.find("offset");
    const auto shape = offset != nullptr ? shape_of(*offset) : std::nullopt;
    const auto& file = attribute(info, "relative_path", Type::kText).text;
    if (file.empty() || file == "." || file == ".." || file.find('/') != std::string::npos) {
      throw base::FormatError(base::str("its metadata names \"", file, "\", which is no file in its folder"));
    }
    const auto* transforms = info.find("transform_descriptors");
    if (transforms != nullptr && !transforms->is(Type::kNone) && !transforms->items.empty()) {
      throw base::FormatError("its files are compressed, or changed otherwise: save it again without extensions");
    }
    const auto begin = attribute(info, "offset", Type::kInteger).integer,
               size = attribute(info, "length", Type::kInteger).integer;
    if (begin < 0 || size < 0) throw base::FormatError("its metadata has a place before the beginning of a file");
    const Stored stored{file, {static_cast<std::uint64_t>(begin), static_cast<std::uint64_t>(size)}};
    const auto& name = attribute(index, "fqn", Type::kText).text;
    if (shape) {
      places.boxes[{name, *shape}] = stored;
    } else {
      places.values[name] = stored;
    }
  }
  return places;
}

ForeignTensor tensor_of(FileSystem& files, const Path& folder, const std::string& name, const PickleValue& metadata,
                        Places& places, bool verify) {
  ForeignTensor tensor{.name = name, .shape = shape_in(metadata, "size")};
  bool first = true;
  for (const auto* chunk : attribute(metadata, "chunks", Type::kList).items) {
    const auto offsets = shape_in(*chunk, "offsets"), sizes = shape_in(*chunk, "sizes");
    const auto place = places.boxes.extract({name, offsets});  // once: the metadata may name a part in many places
    if (place.empty()) throw base::FormatError(base::str(name, ": its metadata does not say where a part lies"));
    const auto& stored = place.mapped();
    const auto found =
        read_torch_file(files, folder / stored.file, {.name = name, .within = stored.extent, .verify = verify});
    if (found.tensors.size() != 1 || found.tensors[0].shape != sizes ||
        (!first && found.tensors[0].dtype != tensor.dtype)) {
      throw base::FormatError(base::str(name, ": a part of it is another one than its metadata says"));
    }
    tensor.dtype = found.tensors[0].dtype;
    tensor.chunks.push_back({found.tensors[0].chunks[0].path, found.tensors[0].chunks[0].begin, offsets, sizes});
    first = false;
  }
  return tensor;
}

// A value that is no tensor, where it is small and plain.
ForeignValue value_of(FileSystem& files, const Path& folder, const std::string& name, Places& places) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{16} << 20;
  const auto place = places.values.extract(name);
  if (place.empty() || place.mapped().extent.size > kMostBytes) return {name, std::nullopt};
  const auto& stored = place.mapped();
  try {
    auto found = read_torch_file(files, folder / stored.file, {.name = name, .within = stored.extent});
    if (found.tensors.empty() && found.left.size() == 1 && found.left[0].name == name) {
      return {name, std::move(found.left[0].plain)};
    }
  } catch (const base::FormatError&) {
    return {name, std::nullopt};  // an object of another class is left
  }
  return {name, std::nullopt};
}

}  // namespace

ForeignCheckpoint read_distributed_checkpoint(FileSystem& files, const Path& folder, bool verify) {
  const auto path = folder / ".metadata";
  const auto bytes = read_all(files, path, kMostMetadataBytes);
  try {
    const Pickle pickle(bytes, in_metadata);
    const auto& metadata = pickle.root();
    auto places = places_of(metadata);
    const auto& tensors = attribute(metadata, "state_dict_metadata", Type::kDict);
    ForeignCheckpoint found;
    for (std::size_t i = 0; i + 1 < tensors.items.size(); i += 2) {
      const auto &name = *tensors.items[i], &value = *tensors.items[i + 1];
      if (!name.is(Type::kText)) throw base::FormatError("its metadata has a tensor without a name");
      if (value.is_object("torch.distributed.checkpoint.metadata.TensorStorageMetadata")) {
        found.tensors.push_back(tensor_of(files, folder, name.text, value, places, verify));
      } else {
        found.left.push_back(value_of(files, folder, name.text, places));
      }
    }
    take_optimizers(found);
    return found;
  } catch (const base::FormatError& error) {
    throw base::FormatError(base::str(path.string(), ": ", error.what()));
  }
}

}  // namespace lamina::archive
