// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/tensor_reader.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/layout/common.h"

namespace lamina::archive {

TensorReader::TensorReader(FileSystem& files, Path folder, const Manifest& manifest)
    : files_(files), folder_(std::move(folder)), manifest_(manifest) {}

BlockReader& TensorReader::open(std::size_t file) {
  constexpr std::size_t kMostOpen = 64;
  if (const auto found = open_.find(file); found != open_.end()) return found->second;
  const auto& data = manifest_.files.at(file);
  const auto path = folder_ / data.name;
  BlockReader opened(CheckedInput(files_.open(path), path.string(), data.bytes, data.checksums));
  if (open_.size() == kMostOpen) open_.clear();
  return open_.emplace(file, std::move(opened)).first->second;
}

void TensorReader::read(const SavedTensor& tensor, std::int64_t begin, std::span<std::byte> to) {
  const auto size = element_bytes(tensor.dtype);
  auto part = layout::whole(tensor.shape);
  part.begin = begin;
  part.end = begin + static_cast<std::int64_t>(to.size() / size);
  part.size = part.end - part.begin;
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::uint64_t>(elements) * size; };
  std::vector<std::pair<std::int64_t, std::int64_t>> read;  // of `to`: first elements, and past the last
  for (const auto& piece : tensor.pieces) {
    layout::CommonRuns runs(piece.region, part);
    while (const auto run = runs.next()) {
      try {
        open(piece.file).read(piece.begin + bytes(run->from), to.subspan(bytes(run->to), bytes(run->count)));
      } catch (const base::FormatError& error) {
        throw base::FormatError(base::str(describe(tensor), ": ", error.what()));
      }
      read.emplace_back(run->to, run->to + run->count);
    }
  }
  std::ranges::sort(read);
  std::int64_t next = 0;
  for (const auto& [first, end] : read) next = first == next ? end : -1;
  if (next != part.size) {
    throw base::FormatError(
        base::str(describe(tensor), ": its pieces have not each element once: ", pieces_problem(tensor)));
  }
}

}  // namespace lamina::archive
