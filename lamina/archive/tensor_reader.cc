// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/tensor_reader.h"

#include <cstring>
#include <optional>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/layout/common.h"

namespace lamina::archive {

TensorReader::TensorReader(FileSystem& files, Path folder, const Manifest& manifest)
    : files_(files), folder_(std::move(folder)), manifest_(manifest) {}

const CheckedInput& TensorReader::input(std::size_t file) {
  constexpr std::size_t kMostOpen = 64;
  auto& found = inputs_[file];
  if (!found) {
    const auto& data = manifest_.files.at(file);
    auto path = folder_ / data.name;
    auto opened = std::make_unique<CheckedInput>(files_.open(path), path.string(), data.bytes, data.checksums);
    if (inputs_.size() > kMostOpen) inputs_.clear();
    return *(inputs_[file] = std::move(opened));
  }
  return *found;
}

void TensorReader::read(const SavedTensor& tensor, std::int64_t begin, std::span<std::byte> to) {
  const auto size = element_bytes(tensor.dtype);
  auto part = layout::whole(tensor.shape);
  part.begin = begin;
  part.end = begin + static_cast<std::int64_t>(to.size() / size);
  part.size = part.end - part.begin;
  const auto bytes = [&](std::int64_t elements) { return static_cast<std::uint64_t>(elements) * size; };
  auto missing = part.size;
  for (const auto& piece : tensor.pieces) {
    layout::CommonRuns runs(piece.region, part);
    const auto first = runs.next();
    if (!first) continue;
    auto last = *first;
    while (const auto run = runs.next()) last = *run;
    // All that lies between in the file is of this part, too, or padding: it is read at once.
    const auto end = last.from + last.count;
    const bool alone = last == *first;
    if (!alone) between_.resize(bytes(end - first->from));
    const auto target = alone ? to.subspan(bytes(first->to), bytes(first->count)) : std::span(between_);
    try {
      input(piece.file).read(piece.begin + bytes(first->from), target);
    } catch (const base::FormatError& error) {
      throw base::FormatError(base::str(describe(tensor), ": ", error.what()));
    }
    if (alone) {
      missing -= first->count;
      continue;
    }
    layout::CommonRuns again(piece.region, part);
    while (const auto run = again.next()) {
      std::memcpy(to.data() + bytes(run->to), between_.data() + bytes(run->from - first->from), bytes(run->count));
      missing -= run->count;
    }
  }
  if (missing != 0) {
    throw base::FormatError(
        base::str(describe(tensor), ": its pieces have not each element once: ", pieces_problem(tensor)));
  }
}

}  // namespace lamina::archive
