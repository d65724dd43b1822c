// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/whole_model.h"

#include <optional>
#include <set>
#include <span>
#include <vector>

#include "lamina/archive/checksums.h"
#include "lamina/archive/piece_reader.h"
#include "lamina/archive/safetensors.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"

namespace lamina::archive {
namespace {

using base::Json;

bool is_of_model(const SavedTensor& tensor) { return tensor.kind == Kind::kParameter || tensor.kind == Kind::kBuffer; }

}  // namespace

std::string model_index(const Manifest& manifest) {
  Json map = Json::object();
  std::uint64_t bytes = 0;
  for (const auto& tensor : manifest.tensors) {
    if (!is_of_model(tensor)) continue;
    if (tensor.pieces.size() != 1 || tensor.pieces.front().region != layout::whole(tensor.shape)) return "";
    map[tensor.name] = manifest.files[tensor.pieces.front().file].name;
    bytes += bytes_of(tensor);
  }
  if (map.empty()) return "";
  return Json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2) + "\n";
}

Manifest make_whole(FileSystem& files, const Path& folder, const Manifest& manifest, std::uint64_t most_file_bytes,
                    const std::function<void()>& went_on) {
  Manifest whole;
  std::vector<const SavedTensor*> own;  // of the next file
  std::uint64_t bytes = 0;
  PieceReader reader(files, folder, manifest);
  const auto write_file = [&] {
    if (own.empty()) return;
    std::vector<Entry> entries;
    for (const auto* tensor : own) entries.push_back({tensor->name, tensor->dtype, tensor->shape});
    const auto name = base::str("model-whole-", whole.files.size() + 1, ".safetensors");
    CheckedOutput output(files.create(folder / name));
    const auto header = make_header(entries, {{"format", "pt"}});
    output.write(std::as_bytes(std::span(header)));
    for (std::size_t i = 0; i < own.size(); ++i) {
      reader.read_parts(*own[i], [&](std::int64_t, std::span<const std::byte> part) {
        output.write(part);
        went_on();
      });
      auto tensor = *own[i];
      tensor.pieces = {{whole.files.size(), entries[i].begin, layout::whole(tensor.shape)}};
      whole.tensors.push_back(std::move(tensor));
    }
    output.finish();
    whole.files.push_back({name, output.size(), output.checksums()});
    own.clear();
    bytes = 0;
  };
  for (const auto& tensor : manifest.tensors) {
    if (!is_of_model(tensor)) continue;
    if (bytes + bytes_of(tensor) > most_file_bytes) write_file();
    own.push_back(&tensor);
    bytes += bytes_of(tensor);
  }
  write_file();
  // Files of which nothing is left go, the others come behind the new ones.
  std::vector<std::optional<std::size_t>> places(manifest.files.size());
  std::set<std::size_t> kept, of_model;
  for (const auto& tensor : manifest.tensors) {
    for (const auto& piece : tensor.pieces) (is_of_model(tensor) ? of_model : kept).insert(piece.file);
  }
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    if (of_model.contains(i) && !kept.contains(i)) {
      files.remove(folder / manifest.files[i].name);
      continue;
    }
    places[i] = whole.files.size();
    whole.files.push_back(manifest.files[i]);
  }
  for (auto tensor : manifest.tensors) {
    if (is_of_model(tensor)) continue;
    for (auto& piece : tensor.pieces) piece.file = *places[piece.file];
    whole.tensors.push_back(std::move(tensor));
  }
  whole.about = manifest.about;
  return whole;
}

}  // namespace lamina::archive
