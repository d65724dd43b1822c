// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/piece_reader.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/chunks.h"
#include "lamina/checkpoint/part.h"
#include "lamina/layout/common.h"

namespace lamina::checkpoint {
namespace {

using archive::kBlock;
using archive::Kind;

// Reads of one file after the other, ascending: of the block that a read ends in the rest is kept for the next one.
class BlockReader {
 public:
  void open(const archive::CheckedInput& input, std::uint64_t bytes) {
    if (&input == input_) return;
    input_ = &input;
    bytes_ = bytes;
    number_ = kNone;
  }

  void read(std::uint64_t offset, std::span<std::byte> to) {
    while (!to.empty()) {
      const auto number = offset / kBlock, skip = offset % kBlock;
      const auto size = block_size(number);
      auto taken = std::min<std::uint64_t>(to.size(), size - skip);
      if (taken == size) {
        taken = std::max(size, to.size() / kBlock * kBlock);  // several at once
        input_->read(offset, to.first(taken));
      } else {
        std::memcpy(to.data(), block(number).data() + skip, taken);
      }
      offset += taken;
      to = to.subspan(taken);
    }
  }

  // Reads the blocks of these bytes, and keeps none but the last.
  void check(std::uint64_t offset, std::uint64_t size) {
    for (auto number = offset / kBlock; number * kBlock < offset + size; ++number) block(number);
  }

 private:
  std::uint64_t block_size(std::uint64_t number) const { return std::min(kBlock, bytes_ - number * kBlock); }

  std::span<const std::byte> block(std::uint64_t number) {
    if (number_ != number) {
      number_ = kNone;
      block_.resize(block_size(number));
      input_->read(number * kBlock, block_);
      number_ = number;
    }
    return block_;
  }

  const archive::CheckedInput* input_ = nullptr;
  std::uint64_t bytes_ = 0;
  static constexpr auto kNone = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t number_ = kNone;  // of the block that is kept
  std::vector<std::byte> block_;
};

Kind alike(Kind kind) { return kind == Kind::kBuffer ? Kind::kParameter : kind; }

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

const archive::CheckedInput& PieceReader::file(std::size_t number) const {
  const auto found = open_.find(number);
  if (found != open_.end()) return found->second;
  const auto& file = manifest_.files.at(number);
  const auto path = folder_ / file.name;
  return open_
      .try_emplace(number, files_.open(path), path.string(), file.bytes,
                   verify_ ? file.checksums : std::vector<archive::Checksum>())
      .first->second;
}

void PieceReader::read(std::span<const Wanted> wanted, const std::function<void()>& went_on) const {
  BlockReader reader;
  for_each_run(wanted, went_on, [&](std::size_t number, const Run& run) {
    reader.open(file(number), manifest_.files.at(number).bytes);
    reader.read(run.offset, bytes_of(run.wanted->into).subspan(run.to, run.bytes));
  });
}

void PieceReader::check(std::span<const Wanted> wanted, const std::function<void()>& went_on) const {
  if (!verify_) return;
  BlockReader reader;
  for_each_run(wanted, went_on, [&](std::size_t number, const Run& run) {
    reader.open(file(number), manifest_.files.at(number).bytes);
    reader.check(run.offset, run.bytes);
  });
}

template <class Take>
void PieceReader::for_each_run(std::span<const Wanted> wanted, const std::function<void()>& went_on,
                               const Take& take) const {
  struct Read {
    const archive::SavedPiece* piece;
    const Wanted* wanted;
  };
  std::vector<Read> reads;
  for (const auto& each : wanted) {
    for (const auto& piece : each.tensor->pieces) reads.push_back({&piece, &each});
  }
  std::ranges::sort(reads, {}, [](const Read& read) { return std::pair(read.piece->file, read.piece->begin); });
  for (const auto& [piece, each] : reads) {
    const auto size = static_cast<std::uint64_t>(traits(each->tensor->dtype).size_bytes);
    // Offsets of runs count from the beginning of what a region keeps.
    layout::CommonRuns runs(piece->region, each->region);
    while (const auto run = runs.next()) {
      try {
        take(piece->file,
             Run{each, piece->begin + static_cast<std::uint64_t>(run->from) * size,
                 static_cast<std::uint64_t>(run->to) * size, static_cast<std::uint64_t>(run->count) * size});
      } catch (const base::FormatError& error) {
        throw base::FormatError(base::str(error.what(), " (", archive::describe(*each->tensor), ")"),
                                base::Code{"checkpoint-damaged"});
      }
    }
    went_on();
  }
}

at::Tensor PieceReader::read(const archive::SavedTensor& tensor) const {
  const auto region = layout::whole(tensor.shape);
  auto into = at::empty(tensor.shape, scalar_type(tensor.dtype));
  const Wanted wanted{&tensor, region, into};
  read({&wanted, 1}, [] {});
  return into;
}

}  // namespace lamina::checkpoint
