// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/piece_reader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_set>

#include "lamina/archive/verify.h"
#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/chunks.h"
#include "lamina/checkpoint/part.h"
#include "lamina/layout/common.h"

namespace lamina::checkpoint {
namespace {

using archive::Kind;

constexpr auto kAtOnce = 4 * archive::kBlock;  // of a long run, before others are heard

Kind alike(Kind kind) { return kind == Kind::kBuffer ? Kind::kParameter : kind; }

void require_whole(const archive::SavedTensor& tensor) {
  try {
    archive::require_each_once(tensor);
  } catch (const base::FormatError& error) {
    throw base::FormatError(error.what(), base::Code{"checkpoint-damaged"});
  }
}

}  // namespace

// Bytes of a file that are wanted in a row.
struct PieceReader::Run {
  const Wanted* wanted;
  std::uint64_t offset;     // in the file
  std::uint64_t to, bytes;  // of what is wanted
};

PieceReader::PieceReader(archive::FileSystem& files, archive::Path folder, archive::Manifest manifest, bool verify)
    : files_(files), folder_(std::move(folder)), manifest_(std::move(manifest)), verify_(verify) {
  for (const auto& tensor : manifest_.tensors) {
    by_key_.emplace(Key{tensor.name, alike(tensor.kind), tensor.optimizer, tensor.state}, &tensor);
    for (const auto& name : tensor.also) {
      by_key_.emplace(Key{name, alike(tensor.kind), tensor.optimizer, tensor.state}, &tensor);
    }
  }
}

const archive::SavedTensor* PieceReader::find(const std::string& name, Kind kind, int optimizer,
                                              const std::string& state) const {
  const auto found = by_key_.find(Key{name, alike(kind), optimizer, state});
  return found == by_key_.end() ? nullptr : found->second;
}

// The reader of one file at a time.
class PieceReader::OpenFile {
 public:
  explicit OpenFile(const PieceReader& reader) : reader_(reader) {}

  archive::BlockReader& open(std::size_t number) {
    if (number_ != number) {
      const auto& file = reader_.manifest_.files.at(number);
      const auto path = reader_.folder_ / file.name;
      open_.emplace(archive::CheckedInput(reader_.files_.open(path), path.string(), file.bytes,
                                          reader_.verify_ ? file.checksums : std::vector<archive::Checksum>()));
      number_ = number;
    }
    return *open_;
  }

 private:
  const PieceReader& reader_;
  std::optional<std::size_t> number_;
  std::optional<archive::BlockReader> open_;
};

void PieceReader::read(std::span<const Wanted> wanted, const std::function<void()>& went_on) const {
  for_each_run(wanted, went_on, [](archive::BlockReader& file, const Run& run) {
    file.read(run.offset, bytes_of(run.wanted->into).subspan(run.to, run.bytes));
  });
}

void PieceReader::check(std::span<const Wanted> wanted, const std::function<void()>& went_on) const {
  if (!verify_) return;
  for_each_run(wanted, went_on, [](archive::BlockReader& file, const Run& run) { file.check(run.offset, run.bytes); });
}

template <class Take>
void PieceReader::for_each_run(std::span<const Wanted> wanted, const std::function<void()>& went_on,
                               const Take& take) const {
  struct Read {
    const archive::SavedPiece* piece;
    const Wanted* wanted;
  };
  std::vector<Read> reads;
  std::unordered_set<const archive::SavedTensor*> checked;
  for (const auto& each : wanted) {
    if (checked.insert(each.tensor).second) require_whole(*each.tensor);
    for (const auto& piece : each.tensor->pieces) reads.push_back({&piece, &each});
  }
  std::ranges::sort(reads, {}, [](const Read& read) { return std::pair(read.piece->file, read.piece->begin); });
  OpenFile file(*this);
  for (const auto& [piece, each] : reads) {
    const auto size = static_cast<std::uint64_t>(traits(each->tensor->dtype).size_bytes);
    // Offsets of runs count from the beginning of what a region keeps.
    layout::CommonRuns runs(piece->region, each->region);
    while (const auto run = runs.next()) {
      const auto offset = piece->begin + static_cast<std::uint64_t>(run->from) * size,
                 to = static_cast<std::uint64_t>(run->to) * size, bytes = static_cast<std::uint64_t>(run->count) * size;
      try {
        for (std::uint64_t at = 0; at < bytes; at += kAtOnce) {
          if (at > 0) went_on();
          take(file.open(piece->file), Run{each, offset + at, to + at, std::min(kAtOnce, bytes - at)});
        }
      } catch (const base::FormatError& error) {
        throw base::FormatError(base::str(error.what(), " (", archive::describe(*each->tensor), ")"),
                                base::Code{"checkpoint-damaged"});
      }
    }
    went_on();
  }
}

void PieceReader::check(const archive::Share& share, const std::function<void()>& went_on) const {
  if (!verify_) return;
  const auto damage =
      archive::verify_share(files_, folder_, manifest_, share, [&](std::uint64_t /*bytes*/) { went_on(); });
  if (damage.empty()) return;
  const auto& first = damage.front();
  const auto tensors = first.tensors.empty() ? "" : base::str(" (", first.tensors.front(), ")");
  throw base::FormatError(
      base::str((folder_ / first.file).string(), ": ", first.what, ": the file is damaged", tensors),
      base::Code{"checkpoint-damaged"});
}

at::Tensor PieceReader::read(const archive::SavedTensor& tensor) const {
  const auto region = layout::whole(tensor.shape);
  auto into = at::empty(tensor.shape, scalar_type(tensor.dtype));
  const Wanted wanted{&tensor, region, into};
  read({&wanted, 1}, [] {});
  return into;
}

}  // namespace lamina::checkpoint
