// SPDX-License-Identifier: Apache-2.0
// The metadata of torch.distributed.checkpoint: a pickle of its classes (torch/distributed/checkpoint/metadata.py).
#include <algorithm>
#include <map>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/foreign/optimizer_states.h"
#include "lamina/foreign/pickle.h"
#include "lamina/foreign/torch_dtype.h"
#include "lamina/foreign/torch_file.h"

namespace lamina::foreign {

using archive::FileSystem;
using archive::Path;
using archive::SavedTensor;
using archive::Share;

namespace {

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

const PickleValue& attribute(const PickleValue& object, const char* name, PickleValue::Type type) {
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
  const auto& all = attribute(metadata, "storage_data", PickleValue::Type::kDict);
  for (std::size_t i = 0; i + 1 < all.items.size(); i += 2) {
    const auto &index = *all.items[i], &info = *all.items[i + 1];
    const auto* offset = index.find("offset");
    const auto shape = offset != nullptr ? shape_of(*offset) : std::nullopt;
    const auto& file = attribute(info, "relative_path", PickleValue::Type::kText).text;
    if (file.empty() || file == "." || file == ".." || file.find('/') != std::string::npos) {
      throw base::FormatError(base::str("its metadata names \"", file, "\", which is no file in its folder"));
    }
    const auto* transforms = info.find("transform_descriptors");
    if (transforms != nullptr && !transforms->is(PickleValue::Type::kNone) && !transforms->items.empty()) {
      throw base::FormatError("its files are compressed, or changed otherwise: save it again without extensions");
    }
    const auto begin = attribute(info, "offset", PickleValue::Type::kInteger).integer,
               size = attribute(info, "length", PickleValue::Type::kInteger).integer;
    if (begin < 0 || size < 0) throw base::FormatError("its metadata has a place before the beginning of a file");
    const Stored stored{file, {static_cast<std::uint64_t>(begin), static_cast<std::uint64_t>(size)}};
    const auto& name = attribute(index, "fqn", PickleValue::Type::kText).text;
    if (shape) {
      places.boxes[{name, *shape}] = stored;
    } else {
      places.values[name] = stored;
    }
  }
  return places;
}

// Adds the pieces that a box of a tensor makes, which lies row by row in a file. The last dimension that the box cuts
// makes a slice, the one before it an interval of the slice's elements; each position of those before makes a piece.
void add_box(SavedTensor& tensor, std::size_t file, std::uint64_t begin, const layout::Shape& offsets,
             const layout::Shape& sizes) {
  const auto& shape = tensor.shape;
  bool fits = offsets.size() == shape.size() && sizes.size() == shape.size();
  for (std::size_t d = 0; fits && d < shape.size(); ++d) {
    fits = sizes[d] <= shape[d] && offsets[d] <= shape[d] - sizes[d];
  }
  if (!fits) throw base::FormatError(base::str(tensor.name, ": a part of it lies beyond its shape"));
  if (std::ranges::find(sizes, 0) != sizes.end()) return;
  auto region = layout::whole(shape);
  const auto cut_before = [&](std::size_t end) {  // the last dimension before it that the box cuts, and 1
    while (end > 0 && sizes[end - 1] == shape[end - 1]) --end;
    return end;
  };
  const auto sliced = cut_before(shape.size()), rows = sliced == 0 ? 0 : cut_before(sliced - 1);
  if (sliced > 0) {
    region.dim = static_cast<int>(sliced - 1);
    region.stripes = {{offsets[sliced - 1], 0, sizes[sliced - 1]}};
    region.extent = sizes[sliced - 1];
  }
  std::int64_t inner = 1, pieces = 1;  // elements of a position in `rows`; positions of the dimensions before it
  for (auto d = rows; d < shape.size(); ++d) inner *= d + 1 == sliced ? region.extent : shape[d];
  for (std::size_t d = 0; d + 1 < rows; ++d) pieces *= sizes[d];
  constexpr std::int64_t kMostPieces = 1 << 20;
  if (pieces > kMostPieces) throw base::FormatError(base::str(tensor.name, ": it is cut in too many dimensions"));
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    if (rows > 0) {
      std::int64_t first = offsets[rows - 1], stride = shape[rows - 1];
      for (auto d = rows - 1, rest = static_cast<std::size_t>(piece); d-- > 0; stride *= shape[d]) {
        const auto size = static_cast<std::size_t>(sizes[d]);
        first += (offsets[d] + static_cast<std::int64_t>(rest % size)) * stride;
        rest /= size;
      }
      region.begin = first * inner;
      region.end = region.begin + sizes[rows - 1] * inner;
    } else {
      region.end = inner;
    }
    region.size = region.end - region.begin;
    tensor.pieces.push_back({file, begin, region});
    begin += static_cast<std::uint64_t>(region.size) * static_cast<std::uint64_t>(traits(tensor.dtype).size_bytes);
  }
}

// Adds a tensor, and files in which it lies. Files have their names as keys.
void add_tensor(FileSystem& files, ForeignCheckpoint& all, std::map<std::string, std::size_t>& known,
                const std::string& name, const PickleValue& metadata, Places& places, std::optional<Share> verify) {
  SavedTensor tensor{.name = name, .shape = shape_in(metadata, "size")};
  bool first = true;
  for (const auto* chunk : attribute(metadata, "chunks", PickleValue::Type::kList).items) {
    const auto offsets = shape_in(*chunk, "offsets"), sizes = shape_in(*chunk, "sizes");
    const auto place = places.boxes.extract({name, offsets});  // once: the metadata may name a part in many places
    if (place.empty()) throw base::FormatError(base::str(name, ": its metadata does not say where a part lies"));
    const auto& stored = place.mapped();
    const auto found =
        read_torch_file(files, all.folder / stored.file, {.name = name, .within = stored.extent, .verify = verify});
    if (found.tensors.size() != 1 || found.tensors[0].shape != sizes || found.tensors[0].pieces.empty() ||
        (!first && found.tensors[0].dtype != tensor.dtype)) {
      throw base::FormatError(base::str(name, ": a part of it is another one than its metadata says"));
    }
    tensor.dtype = found.tensors[0].dtype;
    const auto [file, fresh] = known.try_emplace(stored.file, all.files.size());
    if (fresh) all.files.push_back(found.files.front());
    add_box(tensor, file->second, found.tensors[0].pieces[0].begin, offsets, sizes);
    first = false;
  }
  all.tensors.push_back(std::move(tensor));
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

ForeignCheckpoint read_distributed_checkpoint(FileSystem& files, const Path& folder, std::optional<Share> verify) {
  const auto path = folder / ".metadata";
  const auto bytes = read_all(files, path, kMostMetadataBytes);
  try {
    const Pickle pickle(bytes, in_metadata);
    const auto& metadata = pickle.root();
    auto places = places_of(metadata);
    const auto& tensors = attribute(metadata, "state_dict_metadata", PickleValue::Type::kDict);
    ForeignCheckpoint found;
    found.folder = folder;
    std::map<std::string, std::size_t> known;
    for (std::size_t i = 0; i + 1 < tensors.items.size(); i += 2) {
      const auto &name = *tensors.items[i], &value = *tensors.items[i + 1];
      if (!name.is(PickleValue::Type::kText)) throw base::FormatError("its metadata has a tensor without a name");
      if (value.is_object("torch.distributed.checkpoint.metadata.TensorStorageMetadata")) {
        add_tensor(files, found, known, name.text, value, places, verify);
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

}  // namespace lamina::foreign
