// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/verify.h"

#include <algorithm>
#include <set>

#include "lamina/archive/checksums.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::archive {
namespace {

// The tensors with elements in these bytes of a file.
std::vector<std::string> tensors_in(const Manifest& manifest, std::size_t file, std::uint64_t begin,
                                    std::uint64_t end) {
  std::vector<std::string> names;
  for (const auto& tensor : manifest.tensors) {
    const auto size = static_cast<std::uint64_t>(traits(tensor.dtype).size_bytes);
    const bool there = std::ranges::any_of(tensor.pieces, [&](const SavedPiece& piece) {
      const auto piece_end = piece.begin + static_cast<std::uint64_t>(piece.region.end - piece.region.begin) * size;
      return piece.file == file && piece.begin < end && piece_end > begin;
    });
    if (there) names.push_back(describe(tensor));
  }
  return names;
}

void verify_file(FileSystem& files, const Path& folder, const Manifest& manifest, std::size_t number,
                 const Share& share, const std::function<void(std::uint64_t)>& was_read, std::vector<Damage>& damage) {
  const auto& file = manifest.files[number];
  try {
    const CheckedInput input(files.open(folder / file.name), file.name, file.bytes, file.checksums);
    for (const auto block : input.damaged(share, was_read)) {
      const auto begin = block * kBlock, end = std::min(begin + kBlock, file.bytes);
      damage.push_back({file.name, base::str(end - begin, " bytes at ", begin, " are not those that were written"),
                        tensors_in(manifest, number, begin, end)});
    }
  } catch (const base::FormatError& error) {
    damage.push_back({file.name, error.what(), tensors_in(manifest, number, 0, file.bytes)});
  } catch (const base::FileError& error) {
    damage.push_back({file.name, error.what(), tensors_in(manifest, number, 0, file.bytes)});
  }
}

}  // namespace

std::vector<Damage> verify_share(FileSystem& files, const Path& folder, const Manifest& manifest, const Share& share,
                                 const std::function<void(std::uint64_t)>& was_read) {
  std::vector<Damage> damage;
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    verify_file(files, folder, manifest, i, share, was_read, damage);
  }
  return damage;
}

std::vector<Damage> verify(FileSystem& files, const Path& folder,
                           const std::function<void(std::uint64_t, std::uint64_t)>& progress) {
  Manifest manifest;
  try {
    manifest = read_manifest(read_all(files, folder / kManifestName, kMostManifestBytes));
  } catch (const base::Error& error) {
    return {{kManifestName, error.what(), {}}};
  }
  std::vector<Damage> damage;
  std::set<std::string> links;
  for (const auto& entry : files.list(folder)) {
    const bool known = entry.name == kManifestName ||
                       std::ranges::any_of(manifest.files, [&](const auto& each) { return each.name == entry.name; });
    if (!known) damage.push_back({entry.name, "does not belong there", {}});
    if (known && entry.link) links.insert(entry.name);
  }
  std::uint64_t all = 0, so_far = 0;
  for (const auto& file : manifest.files) all += file.bytes;
  const auto was_read = [&](std::uint64_t bytes) { progress(so_far += bytes, all); };
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    const auto& file = manifest.files[i];
    if (links.contains(file.name)) {
      damage.push_back({file.name, "a link, where a file was written", tensors_in(manifest, i, 0, file.bytes)});
    } else {
      verify_file(files, folder, manifest, i, {}, was_read, damage);
    }
  }
  if (damage.empty()) {  // the sizes are those of real files, which bounds how long this takes
    for (const auto& tensor : manifest.tensors) {
      if (auto problem = pieces_problem(tensor); !problem.empty()) {
        damage.push_back({kManifestName, std::move(problem), {describe(tensor)}});
      }
    }
  }
  return damage;
}

}  // namespace lamina::archive
