// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "lamina/archive/checksums.h"
#include "lamina/archive/manifest.h"
#include "lamina/archive/safetensors.h"
#include "lamina/archive/store.h"

// Checkpoints as tests save them: by writers that hold a piece each of a few tensors.
namespace lamina::archive::testing {

inline std::vector<std::byte> bytes_of(std::string_view text) {
  const auto all = std::as_bytes(std::span(text));
  return {all.begin(), all.end()};
}

// The element at an index of what a save of this seed has, of one byte.
inline std::byte element(std::uint64_t seed, std::uint64_t index) {
  return static_cast<std::byte>((index + 1) * (2 * seed + 0x9e3779b97f4a7c15ULL) >> 40);
}

// A tensor of bytes, cut into shards; each writer writes its own into one safetensors file.
struct Saved {
  std::uint64_t seed = 1;
  std::size_t writers = 4;
  std::int64_t rows = 8, columns = 64;
  std::vector<std::string> names{"h.0.weight", "h.1.weight"};
};

inline layout::Region shard_of(const layout::Shape& shape, std::size_t writer, std::size_t writers) {
  auto region = layout::whole(shape);
  const auto each = (region.size + static_cast<std::int64_t>(writers) - 1) / static_cast<std::int64_t>(writers);
  region.begin = std::min(each * static_cast<std::int64_t>(writer), region.end);
  region.end = std::min(region.begin + each, region.end);
  region.size = region.end - region.begin;
  return region;
}

inline std::vector<std::byte> elements_of(const layout::Region& region, std::uint64_t seed) {
  std::vector<std::byte> bytes;
  for (auto i = region.begin; i < region.end; ++i) bytes.push_back(element(seed, static_cast<std::uint64_t>(i)));
  return bytes;
}

// Writes the data files into the folder and returns their manifest.
inline Manifest write_files(FileSystem& files, const Path& folder, const Saved& saved) {
  Manifest manifest;
  const layout::Shape shape{saved.rows, saved.columns};
  for (const auto& name : saved.names) {
    manifest.tensors.push_back({.name = name, .dtype = layout::DType::kUInt8, .shape = shape});
  }
  for (std::size_t writer = 0; writer < saved.writers; ++writer) {
    std::vector<Entry> entries;
    for (const auto& name : saved.names) {
      const auto region = shard_of(shape, writer, saved.writers);
      entries.push_back({.name = name,
                         .dtype = layout::DType::kUInt8,
                         .shape = saved.writers == 1 ? shape : layout::Shape{region.size}});
    }
    const auto header = make_header(entries);
    const auto name = "model-0000" + std::to_string(writer + 1) + ".safetensors";
    CheckedOutput output(files.create(folder / name));
    output.write(std::as_bytes(std::span(header)));
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const auto region = shard_of(shape, writer, saved.writers);
      output.write(elements_of(region, saved.seed + i));
      manifest.tensors[i].pieces.push_back({.file = writer, .begin = entries[i].begin, .region = region});
    }
    output.finish();
    manifest.files.push_back({name, output.size(), output.checksums()});
  }
  manifest.about = {{"counters", {{"step", saved.seed}}}};
  return manifest;
}

inline void save(FileSystem& files, const Path& folder, const std::string& tag, const Saved& saved) {
  Store store(files, folder);
  auto save = store.begin(tag, "id" + std::to_string(saved.seed), "a test");
  save.commit(write_files(files, save.folder(), saved));
}

}  // namespace lamina::archive::testing
