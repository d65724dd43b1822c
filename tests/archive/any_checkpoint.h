// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>

#include "lamina/archive/checksums.h"
#include "lamina/archive/piece_reader.h"
#include "lamina/archive/safetensors.h"
#include "lamina/archive/store.h"
#include "tests/archive/any_manifest.h"

// Random checkpoints with random elements, saved, and their tensors as whole ones.
namespace lamina::archive::testing {

using Tensors = std::map<std::string, std::vector<std::byte>>;  // by describe()

// Elements that are numbers of each floating kind, whatever their bytes.
inline std::vector<std::byte> any_elements(std::uint64_t bytes, std::uint64_t seed) {
  std::vector<std::byte> all(bytes);
  for (std::uint64_t i = 0; i < bytes; ++i) {
    all[i] = static_cast<std::byte>(((i + seed) * 0x9e3779b97f4a7c15ULL >> 40) & 0x3f);
  }
  return all;
}

inline Tensors save_any(FileSystem& files, const Path& folder, const std::string& tag) {
  Manifest manifest;
  for (int i = *rc::gen::inRange(1, 4); i > 0; --i) manifest.files.push_back({"f" + std::to_string(i), 8, {}});
  for (int i = *rc::gen::inRange(1, 5); i > 0; --i) {
    auto tensor = any_tensor("t" + std::to_string(i), manifest.files);
    if (safetensors_name(tensor.dtype).empty()) {  // whose elements have other sizes: make them bytes
      for (auto& file : manifest.files) file.bytes = std::max<std::uint64_t>(file.bytes, 8);
      tensor.dtype = layout::DType::kUInt8;
    }
    manifest.tensors.push_back(std::move(tensor));
  }
  manifest.about = {{"counters", {{"step", 7}}}, {"saved_at", tag}};
  Tensors tensors;
  std::vector<std::vector<std::byte>> contents;
  for (const auto& file : manifest.files) contents.emplace_back(file.bytes);
  for (const auto& tensor : manifest.tensors) {
    const auto whole = any_elements(bytes_of(tensor), tensors.size());
    const auto size = static_cast<std::ptrdiff_t>(element_bytes(tensor.dtype));
    for (const auto& piece : tensor.pieces) {
      auto* to = contents[piece.file].data() + piece.begin;
      for (const auto& run : layout::common(layout::whole(tensor.shape), piece.region)) {
        std::copy_n(whole.data() + run.from * size, run.count * size, to + run.to * size);
      }
    }
    tensors[describe(tensor)] = whole;
  }
  Store store(files, folder);
  auto save = store.begin(tag, "1", "a test");
  for (std::size_t i = 0; i < contents.size(); ++i) {
    CheckedOutput output(files.create(save.folder() / manifest.files[i].name));
    output.write(contents[i]);
    output.finish();
    manifest.files[i].checksums = output.checksums();
  }
  save.commit(std::move(manifest));
  return tensors;
}

inline Tensors tensors_of(FileSystem& files, const Found& found) {
  Tensors tensors;
  PieceReader reader(files, found.folder, found.manifest);
  for (const auto& tensor : found.manifest.tensors) {
    auto& bytes = tensors[describe(tensor)];
    reader.read_parts(tensor, [&](auto, auto part) { bytes.insert(bytes.end(), part.begin(), part.end()); });
  }
  return tensors;
}

}  // namespace lamina::archive::testing
