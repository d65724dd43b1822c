// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/rank_files.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "lamina/archive/checksums.h"
#include "lamina/archive/safetensors.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/chunks.h"

namespace lamina::checkpoint {
namespace {

using archive::Kind;

std::string number(std::size_t of) {
  auto digits = base::str(of);
  return std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits;
}

bool is_whole(const Part& part) { return part.region == layout::whole(part.tensor.shape); }

void write_file(archive::FileSystem& files, const archive::Path& folder, const std::string& name,
                std::span<const Part* const> parts, archive::Manifest& manifest,
                const std::function<void(std::int64_t)>& wrote) {
  std::vector<archive::Entry> entries;
  for (const auto* part : parts) {
    const auto shape = is_whole(*part) ? part->tensor.shape : layout::Shape{count(part->region)};
    entries.push_back({entry_name(*part), part->tensor.dtype, shape});
  }
  const auto header = archive::make_header(entries, {{"format", "pt"}});
  archive::CheckedOutput output(files.create(folder / name));
  output.write(std::as_bytes(std::span(header)));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const auto& part = *parts[i];
    for_each_chunk(part.elements, count(part.region), [&](std::span<const std::byte> bytes) {
      output.write(bytes);
      wrote(static_cast<std::int64_t>(bytes.size()));
    });
    auto tensor = part.tensor;
    auto region = part.region;
    region.size = count(region);
    tensor.pieces = {{manifest.files.size(), entries[i].begin, region}};
    manifest.tensors.push_back(std::move(tensor));
  }
  output.finish();
  manifest.files.push_back({name, output.size(), output.checksums()});
}

using PieceKey = std::tuple<std::string, Kind, int, std::string>;

PieceKey key_of(const archive::SavedTensor& tensor) {
  return {tensor.name, tensor.kind, tensor.optimizer, tensor.state};
}

}  // namespace

std::string entry_name(const Part& part) {
  const auto& tensor = part.tensor;
  std::string name = tensor.name;
  if (tensor.kind == Kind::kMaster) name += base::str("/", tensor.optimizer, "#master");  // no state's name
  if (tensor.kind == Kind::kState) name += base::str("/", tensor.optimizer, "/", tensor.state);
  return is_whole(part) ? name : base::str(name, "[", part.region.begin, ":", part.region.end, "]");
}

archive::Manifest write_rank_files(archive::FileSystem& files, const archive::Path& folder, std::size_t rank,
                                   std::span<const Part> parts, const std::function<void(std::int64_t)>& wrote) {
  archive::Manifest manifest;
  for (const auto* kind : {"model", "optimizer", "content"}) {
    std::vector<const Part*> file;
    std::int64_t bytes = 0;
    std::size_t written = 0;
    const auto end_file = [&] {
      if (file.empty()) return;
      const auto name =
          base::str(kind, "-", number(rank + 1), written++ == 0 ? "" : "-" + number(written), ".safetensors");
      write_file(files, folder, name, file, manifest, wrote);
      file.clear();
      bytes = 0;
    };
    for (const auto& part : parts) {
      if (archive::family_of(part.tensor.kind) != std::string_view(kind)) continue;
      if (bytes + size_bytes(part) > kMostFileBytes) end_file();
      file.push_back(&part);
      bytes += size_bytes(part);
    }
    end_file();
  }
  return manifest;
}

archive::DataFile write_own_file(archive::FileSystem& files, const archive::Path& folder, const OwnFile& file,
                                 const std::function<void(std::int64_t)>& wrote) {
  archive::CheckedOutput output(files.create(folder / file.name));
  file.make([&](std::span<const std::byte> bytes) {
    output.write(bytes);
    wrote(static_cast<std::int64_t>(bytes.size()));
  });
  output.finish();
  return {file.name, output.size(), output.checksums()};
}

archive::Manifest write_text(archive::FileSystem& files, const archive::Path& folder, const std::string& name,
                             const std::string& text) {
  archive::CheckedOutput output(files.create(folder / name));
  output.write(std::as_bytes(std::span(text)));
  output.finish();
  archive::Manifest manifest;
  manifest.files.push_back({name, output.size(), output.checksums()});
  return manifest;
}

archive::Manifest merge(std::span<const archive::Manifest> manifests) {
  archive::Manifest all;
  std::map<PieceKey, std::size_t> places;
  for (const auto& manifest : manifests) {
    for (const auto& tensor : manifest.tensors) {
      const auto [place, is_new] = places.emplace(key_of(tensor), all.tensors.size());
      if (is_new) {
        all.tensors.push_back(tensor);
        all.tensors.back().pieces.clear();
      }
      auto& whole = all.tensors[place->second];
      if (whole.shape != tensor.shape || whole.dtype != tensor.dtype) {
        throw base::UsageError(base::str(archive::describe(tensor), ": ranks have it of different shapes or dtypes"));
      }
      for (auto piece : tensor.pieces) {
        piece.file += all.files.size();
        whole.pieces.push_back(std::move(piece));
      }
    }
    all.files.insert(all.files.end(), manifest.files.begin(), manifest.files.end());
  }
  for (const auto& tensor : all.tensors) {
    const auto problem = archive::pieces_problem(tensor);
    if (!problem.empty()) throw base::InternalError(base::str(archive::describe(tensor), ": ", problem));
  }
  return all;
}

}  // namespace lamina::checkpoint
