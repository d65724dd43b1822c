// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/model_folder.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "lamina/archive/piece_reader.h"
#include "lamina/archive/safetensors.h"
#include "lamina/archive/whole_model.h"
#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/config/problems.h"
#include "lamina/faces/sayings.h"
#include "lamina/foreign/torch_file.h"

namespace lamina::foreign {

using archive::FileSystem;
using archive::kModelFile;
using archive::kModelIndex;
using archive::Manifest;
using archive::Path;
using archive::SavedTensor;
using archive::Share;

namespace {

using base::FormatError;
using base::Json;

constexpr std::uint64_t kMostIndexBytes = std::uint64_t{100} << 20;

bool has(FileSystem& files, const Path& folder, std::string_view name) {
  return std::ranges::any_of(files.list(folder), [&](const auto& each) { return each.name == name; });
}

// The files that an index names, each once.
std::set<std::string> indexed_files(FileSystem& files, const Path& path, std::set<std::string>& tensors) {
  const auto refuse = [&](const std::string& why) { throw FormatError(base::str(path.string(), ": ", why)); };
  std::set<std::string> names;
  Json json;
  try {
    json = base::parse_json(read_all(files, path, kMostIndexBytes));
  } catch (const Json::exception& error) {
    refuse("not valid JSON: " + config::json_reason(error));
  }
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) refuse("no weight_map");
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string()) refuse(base::str(tensor, " has no file"));
    const auto name = file.get<std::string>();
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos) {
      refuse(faces::said("no-file-beside", base::str('"', name, '"')));
    }
    tensors.insert(tensor);
    names.insert(name);
  }
  return names;
}

void add_safetensors(FileSystem& files, const Path& folder, const std::string& name, std::optional<Share> /*verify*/,
                     Manifest& manifest) {
  const auto file = files.open(folder / name);
  const auto header = read_header(*file, (folder / name).string());
  for (const auto& entry : header.entries) {
    SavedTensor tensor{.name = entry.name, .dtype = entry.dtype, .shape = entry.shape};
    tensor.pieces.push_back({manifest.files.size(), entry.begin, layout::whole(entry.shape)});
    manifest.tensors.push_back(std::move(tensor));
  }
  manifest.files.push_back({name, file->size(), {}});
}

void add_torch_file(FileSystem& files, const Path& folder, const std::string& name, std::optional<Share> verify,
                    Manifest& manifest) {
  constexpr std::string_view kPartialMark = "_smp_is_partial";  // False in a whole state dict
  const auto path = folder / name;
  const auto found = read_torch_file(files, path, {.gather = true, .verify = verify});
  for (const auto& [value, _] : found.left) {
    if (value != kPartialMark) throw FormatError(base::str(path.string(), ": ", value, " is no tensor"));
  }
  for (auto tensor : found.tensors) {
    for (auto& piece : tensor.pieces) piece.file = manifest.files.size();
    manifest.tensors.push_back(std::move(tensor));
  }
  manifest.files.push_back(found.files.front());
}

struct Format {
  const char* file;
  const char* index;
  void (*add)(FileSystem& files, const Path& folder, const std::string& name, std::optional<Share> verify,
              Manifest& manifest);
};

// Finds out which files of a model a folder has, the better ones where it has both; nullptr for none.
const Format* format_of(FileSystem& files, const Path& folder) {
  static constexpr Format kFormats[] = {{kModelFile, kModelIndex, add_safetensors},
                                        {"pytorch_model.bin", "pytorch_model.bin.index.json", add_torch_file}};
  const auto* format = std::ranges::find_if(
      kFormats, [&](const auto& each) { return has(files, folder, each.file) || has(files, folder, each.index); });
  return format == std::end(kFormats) ? nullptr : format;
}

}  // namespace

bool is_model_folder(FileSystem& files, const Path& folder) { return format_of(files, folder) != nullptr; }

Manifest read_model_folder(FileSystem& files, const Path& folder, std::optional<Share> verify) {
  const auto* format = format_of(files, folder);
  if (format == nullptr) throw FormatError(base::str(folder.string(), ": no folder of a model"));
  std::set<std::string> names{format->file}, tensors;
  const auto index = folder / format->index;
  if (has(files, folder, format->index)) names = indexed_files(files, index, tensors);
  Manifest manifest;
  for (const auto& name : names) format->add(files, folder, name, verify, manifest);
  for (const auto& tensor : manifest.tensors) {
    tensors.erase(tensor.name);
    for (const auto& name : tensor.also) tensors.erase(name);
  }
  if (!tensors.empty()) {
    throw FormatError(base::str(index.string(), ": it names ", *tensors.begin(), ", which its files do not have"));
  }
  return manifest;
}

Manifest read_model_file(FileSystem& files, const Path& path, std::optional<Share> verify) {
  Manifest manifest;
  add_torch_file(files, path.parent_path(), path.filename().string(), verify, manifest);
  return manifest;
}

}  // namespace lamina::foreign
