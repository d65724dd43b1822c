// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/reshard.h"

#include <algorithm>
#include <iomanip>
#include <sstream>

#include "lamina/archive/extra_files.h"
#include "lamina/archive/piece_reader.h"
#include "lamina/archive/safetensors.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::archive {
namespace {

struct Shard {
  std::size_t tensor = 0;
  layout::Region region;
};

// Elements of a tensor that one writer has; none beyond its end. Nothing is in the first one's.
std::optional<layout::Region> shard_of(const layout::Shape& shape, std::size_t writer, std::size_t writers) {
  auto region = layout::whole(shape);
  const auto count = static_cast<std::int64_t>(writers),
             each = region.size / count + (region.size % count != 0 ? 1 : 0);
  const bool whole = writers == 1 || region.size == 0;
  if (whole) return writer == 0 ? std::optional(region) : std::nullopt;
  const auto all = region.size;
  region.begin = std::min(each * static_cast<std::int64_t>(writer), all);
  region.end = std::min(region.begin + each, all);
  region.size = region.end - region.begin;
  return region.size > 0 ? std::optional(region) : std::nullopt;
}

// Shards of tensors that make a file, of one kind and one writer.
std::vector<std::vector<Shard>> shard_files(const Manifest& manifest, std::string_view prefix, std::size_t writers) {
  std::vector<std::vector<Shard>> files;
  for (std::size_t writer = 0; writer < writers; ++writer) {
    std::uint64_t bytes = kMostFileBytes;  // the next one begins a file
    for (std::size_t i = 0; i < manifest.tensors.size(); ++i) {
      const auto& tensor = manifest.tensors[i];
      if (family_of(tensor.kind) != prefix) continue;
      const auto region = shard_of(tensor.shape, writer, writers);
      if (!region) continue;
      const auto own = static_cast<std::uint64_t>(region->size) * element_bytes(tensor.dtype);
      if (bytes == kMostFileBytes || bytes + own > kMostFileBytes) {
        files.emplace_back();
        bytes = 0;
      }
      bytes = std::min(bytes + own, kMostFileBytes - 1);
      files.back().push_back({i, *region});
    }
  }
  for (auto& file : files) {
    std::ranges::stable_sort(file, std::greater(),
                             [&](const Shard& each) { return element_bytes(manifest.tensors[each.tensor].dtype); });
  }
  return files;
}

class ReshardWriter {
 public:
  ReshardWriter(FileSystem& files, const Found& from, const Path& folder, const MergeProgress& progress)
      : files_(files), from_(from), folder_(folder), progress_(progress), reader_(files, from.folder, from.manifest) {
    manifest_.about = from.manifest.about;
    manifest_.tensors = from.manifest.tensors;
    for (auto& tensor : manifest_.tensors) {
      tensor.pieces.clear();
      all_ += bytes_of(tensor);
    }
  }

  Manifest write(std::size_t writers) {
    for (const auto* prefix : {"model", "optimizer", "content"}) {
      const auto all = shard_files(from_.manifest, prefix, writers);
      for (std::size_t i = 0; i < all.size(); ++i) {
        std::ostringstream name;
        name << prefix << '-' << std::setfill('0') << std::setw(5) << i + 1 << ".safetensors";
        write_file(name.str(), all[i]);
      }
    }
    for (auto& each : copy_extra_files(files_, from_, folder_)) manifest_.files.push_back(std::move(each));
    return std::move(manifest_);
  }

 private:
  void write_file(const std::string& name, const std::vector<Shard>& shards) {
    std::vector<Entry> entries;
    for (const auto& [index, region] : shards) {
      const auto& tensor = manifest_.tensors[index];
      const bool whole = region.size == layout::numel(tensor.shape);
      entries.push_back({.name = entry_name(tensor),
                         .dtype = tensor.dtype,
                         .shape = whole ? tensor.shape : layout::Shape{region.size}});
    }
    const auto header = make_header(entries, {{"format", "pt"}});
    CheckedOutput output(files_.create(folder_ / name));
    output.write(std::as_bytes(std::span(header)));
    for (std::size_t i = 0; i < shards.size(); ++i) {
      const auto& [index, region] = shards[i];
      auto& tensor = manifest_.tensors[index];
      copy(from_.manifest.tensors[index], region, output);
      tensor.pieces.push_back({manifest_.files.size(), entries[i].begin, region});
    }
    output.finish();
    manifest_.files.push_back({name, output.size(), output.checksums()});
  }

  void copy(const SavedTensor& tensor, const layout::Region& region, CheckedOutput& output) {
    const auto size = static_cast<std::int64_t>(element_bytes(tensor.dtype));
    const auto most = static_cast<std::int64_t>(kPartBytes) / size;
    for (auto at = region.begin; at < region.end; at += most) {
      part_.resize(static_cast<std::size_t>(std::min(most, region.end - at) * size));
      reader_.read(tensor, at, part_);
      output.write(part_);
      progress_(so_far_ += part_.size(), all_);
    }
  }

  FileSystem& files_;
  const Found& from_;
  const Path& folder_;
  const MergeProgress& progress_;
  PieceReader reader_;
  Manifest manifest_;
  std::uint64_t all_ = 0, so_far_ = 0;
  std::vector<std::byte> part_;
};

}  // namespace

Found reshard(FileSystem& files, const Found& from, const Path& to, std::size_t writers, const std::string& id,
              const MergeProgress& progress) {
  constexpr std::size_t kMostWriters = 10'000;
  if (writers < 1 || writers > kMostWriters) {
    throw base::UsageError(base::str("a checkpoint of ", writers, " writers; expected 1 to ", kMostWriters));
  }
  if (from.manifest.tensors.empty()) {
    throw base::UsageError(base::str(from.folder.string(),
                                     " lists no tensors that could be cut into shards; files of "
                                     "torch.save become a checkpoint by `lamina checkpoint convert`"));
  }
  Store store(files, to);
  for (const auto& each : store.list()) {
    if (each.tag != from.tag) continue;
    throw base::UsageError(base::str(to.string(), " has a checkpoint ", from.tag, " already: take another folder"));
  }
  auto save = store.begin(from.tag, id, "lamina checkpoint");
  save.commit(ReshardWriter(files, from, save.folder(), progress).write(writers));
  return store.find(from.tag);
}

}  // namespace lamina::archive
