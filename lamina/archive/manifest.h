// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/archive/checksums.h"
#include "lamina/layout/dtype.h"
#include "lamina/layout/region.h"

namespace lamina::archive {

// A file of a checkpoint beside its manifest, written by one rank.
struct DataFile {
  std::string name;  // in the checkpoint's folder
  std::uint64_t bytes = 0;
  std::vector<Checksum> checksums;  // of its blocks

  friend bool operator==(const DataFile&, const DataFile&) = default;
};

// Elements of a tensor that lie in one file, in the order of the region, whose size has no padding.
struct SavedPiece {
  std::size_t file = 0;
  std::uint64_t begin = 0;  // in the file
  layout::Region region;

  friend bool operator==(const SavedPiece&, const SavedPiece&) = default;
};

enum class Kind { kParameter, kBuffer, kMaster, kState, kContent };

struct SavedTensor {
  std::string name;  // the model's, whose it is: "h.0.attn.c_attn.weight"
  Kind kind = Kind::kParameter;
  int optimizer = 0;  // of masters and states
  std::string state;  // "exp_avg"; "" of other kinds
  layout::DType dtype = layout::DType::kFloat32;
  layout::Shape shape;  // of the whole
  std::vector<SavedPiece> pieces;
  std::vector<std::string> also;  // other names of the same tensor
  // Its elements, in the place of pieces: of a tensor of others that does not lie row by row in a file, or a number.
  std::vector<std::byte> value = {};

  friend bool operator==(const SavedTensor&, const SavedTensor&) = default;
};

// "h.0.weight", "exp_avg of h.0.weight".
std::string describe(const SavedTensor& tensor);
// A name of its own for each tensor of a file that holds whole ones.
std::string entry_name(const SavedTensor& tensor);
// The beginning of the names of files that hold tensors of a kind: "model", "optimizer" or "content".
const char* family_of(Kind kind);

// The list of all that a checkpoint is made of. Written last: a folder with one is a whole checkpoint.
struct Manifest {
  std::string id;           // of the save, which no other has
  std::int64_t number = 0;  // later ones of a folder have larger ones
  std::vector<DataFile> files;
  std::vector<SavedTensor> tensors;
  nlohmann::json about = nlohmann::json::object();  // what is no tensor: layout, partition, options, counters

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

inline constexpr auto kManifestName = "manifest.json";
inline constexpr std::uint64_t kMostManifestBytes = std::uint64_t{1} << 30;

// The elements that a manifest has of its tensors: all, or those of one of several writers.
enum class Elements { kAll, kSome };

// With a checksum of its own. Throws base::UsageError for a manifest that read_manifest() would refuse.
std::string write_manifest(const Manifest& manifest, Elements elements = Elements::kAll);

// Any bytes are safe, and take no more than twice their number of memory, and 128 MiB. Throws base::FormatError unless
// they are a manifest, and as it was written: names that leave the folder, pieces beyond their file, two in the same
// bytes of one, fewer elements than a tensor has. That each element is there once, pieces_problem() says.
Manifest read_manifest(std::string_view text, Elements elements = Elements::kAll);

// A clause, "elements from 64 to 128 are in no piece" or "in two pieces"; "" where each element is in one piece. Takes
// time for each row that a piece cuts, as CommonRuns.
std::string pieces_problem(const SavedTensor& tensor);

}  // namespace lamina::archive
