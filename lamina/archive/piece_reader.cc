// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/piece_reader.h"

#include <algorithm>
#include <utility>

#include "lamina/archive/verify.h"
#include "lamina/base/error.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"
#include "lamina/layout/common.h"

namespace lamina::archive {
namespace {

constexpr auto kAtOnce = 4 * kBlock;  // of a long run, before others are heard

base::FormatError damaged(const std::string& text) { return base::FormatError(text, base::Code{"checkpoint-damaged"}); }

// Gives elements that lie in no file.
void copy_value(const Wanted& wanted) {
  const auto size = element_bytes(wanted.tensor->dtype);
  layout::CommonRuns runs(layout::whole(wanted.tensor->shape), wanted.region);
  while (const auto run = runs.next()) {
    const auto bytes = static_cast<std::uint64_t>(run->count) * size;
    std::ranges::copy(std::span(wanted.tensor->value).subspan(static_cast<std::uint64_t>(run->from) * size, bytes),
                      wanted.into.subspan(static_cast<std::uint64_t>(run->to) * size).begin());
  }
}

}  // namespace

// Bytes of a file that are wanted in a row.
struct PieceReader::Run {
  const Wanted& wanted;
  std::uint64_t offset;     // in the file
  std::uint64_t to, bytes;  // of what is wanted
};

CheckedInput& PieceReader::open(std::size_t file, std::size_t most_open) {
  if (const auto found = open_.find(file); found != open_.end()) return found->second;
  const auto& data = manifest_.files.at(file);
  const auto path = folder_ / data.name;
  CheckedInput opened(files_.open(path), path.string(), data.bytes, verify_ ? data.checksums : std::vector<Checksum>());
  if (open_.size() >= most_open) open_.clear();
  return open_.emplace(file, std::move(opened)).first->second;
}

template <class Take>
void PieceReader::for_each_run(std::span<const Wanted> wanted, std::size_t most_open, const WentOn& went_on,
                               const Take& take) {
  std::vector<std::pair<const SavedPiece*, const Wanted*>> reads;
  for (const auto& each : wanted) {
    if (!each.tensor->value.empty()) {
      if (!each.into.empty()) copy_value(each);
      continue;
    }
    if (!checked_.contains(each.tensor)) {
      if (const auto problem = pieces_problem(*each.tensor); !problem.empty()) {
        throw damaged(base::str(describe(*each.tensor), ": its pieces have not each element once: ", problem));
      }
      checked_.insert(each.tensor);
    }
    for (const auto& piece : each.tensor->pieces) reads.emplace_back(&piece, &each);
  }
  std::ranges::sort(reads, {}, [](const auto& read) { return std::pair(read.first->file, read.first->begin); });
  for (const auto& [piece, each] : reads) {
    const auto size = element_bytes(each->tensor->dtype);
    // Offsets of runs count from the beginning of what a region keeps.
    layout::CommonRuns runs(piece->region, each->region);
    while (const auto run = runs.next()) {
      const auto offset = piece->begin + static_cast<std::uint64_t>(run->from) * size,
                 to = static_cast<std::uint64_t>(run->to) * size, bytes = static_cast<std::uint64_t>(run->count) * size;
      try {
        for (std::uint64_t at = 0; at < bytes; at += kAtOnce) {
          if (at > 0) went_on();
          take(open(piece->file, most_open), Run{*each, offset + at, to + at, std::min(kAtOnce, bytes - at)});
        }
      } catch (const base::FormatError& error) {
        throw damaged(base::str(error.what(), " (", describe(*each->tensor), ")"));
      }
    }
    went_on();
  }
}

void PieceReader::read(std::span<const Wanted> wanted, const WentOn& went_on) {
  for_each_run(wanted, 1, went_on, [](CheckedInput& file, const Run& run) {
    file.read(run.offset, run.wanted.into.subspan(run.to, run.bytes));
  });
  open_.clear();
}

void PieceReader::read(const SavedTensor& tensor, std::int64_t begin, std::span<std::byte> to) {
  constexpr std::size_t kMostOpen = 64;  // the next elements lie in the same files
  auto region = layout::whole(tensor.shape);
  region.size = static_cast<std::int64_t>(to.size() / element_bytes(tensor.dtype));
  region.begin = begin;
  region.end = begin + region.size;
  const Wanted wanted{&tensor, std::move(region), to};
  for_each_run(
      {&wanted, 1}, kMostOpen, [] {},
      [](CheckedInput& file, const Run& run) { file.read(run.offset, run.wanted.into.subspan(run.to, run.bytes)); });
}

void PieceReader::check(std::span<const Wanted> wanted, const WentOn& went_on) {
  if (!verify_) return;
  for_each_run(wanted, 1, went_on, [](CheckedInput& file, const Run& run) { file.check(run.offset, run.bytes); });
  open_.clear();
}

void PieceReader::check(const Share& share, const WentOn& went_on) {
  if (!verify_) return;
  const auto damage = verify_share(files_, folder_, manifest_, share, [&](std::uint64_t /*bytes*/) { went_on(); });
  if (damage.empty()) return;
  const auto& first = damage.front();
  const auto tensors = first.tensors.empty() ? "" : base::str(" (", base::printable_line(first.tensors.front()), ")");
  throw damaged(base::str((folder_ / first.file).string(), ": ", first.what, ": the file is damaged", tensors));
}

}  // namespace lamina::archive
