// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/piece_reader.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <fstream>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/checkpoint/chunks.h"
#include "lamina/checkpoint/rank_files.h"
#include "lamina/layout/common.h"
#include "tests/archive/temp_folder.h"
#include "tests/layout/any_layout.h"

namespace lamina::checkpoint {
namespace {

using archive::PieceReader;
using archive::Wanted;
using archive::testing::TempFolder;

const auto kNothing = [](std::int64_t) {};

archive::SavedTensor named(const std::string& name, const layout::Shape& shape) {
  archive::SavedTensor tensor;
  tensor.name = name;
  tensor.dtype = layout::DType::kInt64;
  tensor.shape = shape;
  return tensor;
}

// The elements of a region of a tensor whose element i is i, in memory with padding.
at::Tensor memory_of(const layout::Region& region) {
  auto memory = at::full({region.size}, -1, at::kLong);
  layout::CommonRuns runs(layout::whole(region.whole), region);
  while (const auto run = runs.next()) {
    memory.narrow(0, run->to, run->count).copy_(at::arange(run->from, run->from + run->count));
  }
  return memory;
}

// Saves a tensor as the ranks of a layout do, each in files of its own.
archive::Manifest saved(const std::filesystem::path& folder, const layout::ParameterLayout& layout) {
  std::vector<archive::Manifest> manifests;
  for (const auto& piece : layout::pieces(layout)) {
    const Part part{named("w", layout.shape), piece.region, memory_of(piece.region)};
    manifests.push_back(write_rank_files(archive::file_system(), folder, manifests.size(), {&part, 1}, kNothing));
  }
  return merge(manifests);
}

RC_GTEST_PROP(PieceReaderProperty, WhatOneLayoutSavedAnyOtherOneReads, ()) {
  const auto shape = layout::any_shape();
  const auto from = layout::any_layout(shape), to = layout::any_layout(shape);
  const TempFolder folder;
  std::filesystem::create_directory(folder / "a");
  const auto manifest = saved(folder / "a", from);
  PieceReader reader(archive::file_system(), folder / "a", manifest);
  for (const auto& piece : layout::pieces(to)) {
    const auto into = at::full({piece.region.size}, -1, at::kLong);
    const Wanted wanted{&manifest.tensors.front(), piece.region, bytes_of(into)};
    reader.read({&wanted, 1}, [] {});
    RC_ASSERT(at::equal(into, memory_of(piece.region)));
  }
}

// Counts what is read of files.
class Counted : public archive::FileSystem {
 public:
  std::int64_t bytes = 0;

  std::unique_ptr<Output> create(const archive::Path& path) override { return system_.create(path); }
  std::unique_ptr<Input> open(const archive::Path& path) override {
    return std::make_unique<CountedInput>(system_.open(path), bytes);
  }
  void make_folder(const archive::Path& path) override { system_.make_folder(path); }
  void make_new_folder(const archive::Path& path) override { system_.make_new_folder(path); }
  void rename(const archive::Path& from, const archive::Path& to) override { system_.rename(from, to); }
  bool exchange(const archive::Path& one, const archive::Path& other) override { return system_.exchange(one, other); }
  void sync_folder(const archive::Path& path) override { system_.sync_folder(path); }
  std::vector<Entry> list(const archive::Path& folder) override { return system_.list(folder); }
  void remove(const archive::Path& path) override { system_.remove(path); }
  std::uint64_t free_bytes(const archive::Path& path) override { return system_.free_bytes(path); }
  std::unique_ptr<Lock> try_lock(const archive::Path& path, const std::string& words, std::string* holder) override {
    return system_.try_lock(path, words, holder);
  }

 private:
  class CountedInput : public Input {
   public:
    CountedInput(std::unique_ptr<Input> input, std::int64_t& bytes) : input_(std::move(input)), bytes_(bytes) {}
    std::uint64_t size() const override { return input_->size(); }
    void read(std::uint64_t offset, std::span<std::byte> to) const override {
      bytes_ += static_cast<std::int64_t>(to.size());
      input_->read(offset, to);
    }

   private:
    const std::unique_ptr<Input> input_;
    std::int64_t& bytes_;
  };

  archive::FileSystem& system_ = archive::file_system();
};

TEST(PieceReader, ReadsNoMoreThanTheBlocksOfWhatIsWantedEachOnce) {
  constexpr std::int64_t kRows = 1 << 20;  // 8 MiB
  const layout::ParameterLayout whole{.name = "w", .shape = {kRows}};
  const TempFolder folder;
  std::filesystem::create_directory(folder / "a");
  Counted files;
  const auto manifest = saved(folder / "a", whole);
  PieceReader reader(files, folder / "a", manifest);
  const auto into = at::empty({1000, 100}, at::kLong);
  std::vector<Wanted> wanted;  // a thousand tensors' worth of small neighbours
  for (std::int64_t i = 0; i < 1000; ++i) {
    const auto region = within(layout::whole({kRows}), i * 100, (i + 1) * 100);
    wanted.push_back({&manifest.tensors.front(), region, bytes_of(into[i])});
  }
  reader.read(wanted, [] {});
  ASSERT_TRUE(at::equal(into, at::arange(100'000).view({1000, 100})));
  EXPECT_EQ(files.bytes, std::int64_t{1} << 20);  // 800,000 bytes behind a header
  reader.check(wanted, [] {});
  EXPECT_EQ(files.bytes, std::int64_t{2} << 20);
}

TEST(PieceReader, NamesFileAndTensorOfWhatIsNotAsItWasWritten) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "a");
  const auto manifest = saved(folder / "a", {.name = "w", .shape = {1000}});
  const auto path = folder / "a" / manifest.files.front().name;
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-9, std::ios::end);
    file.put('x');
  }
  PieceReader reader(archive::file_system(), folder / "a", manifest);
  const auto& tensor = manifest.tensors.front();
  std::vector<std::byte> bytes(8000);
  try {
    reader.read(tensor, 0, bytes);
    FAIL();
  } catch (const base::FormatError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find(path.string()), std::string::npos) << text;
    EXPECT_NE(text.find("(w)"), std::string::npos) << text;
  }
  const std::vector<Wanted> wanted{{&tensor, layout::whole({1000}), {}}};
  EXPECT_THROW(reader.check(wanted, [] {}), base::FormatError);
  EXPECT_THROW(reader.check(archive::Share{}, [] {}), base::FormatError);
  PieceReader trusting(archive::file_system(), folder / "a", manifest, false);
  trusting.check(wanted, [] {});
  trusting.read(tensor, 0, bytes);
}

// Their sizes add up to the tensor's; half of it is in no piece.
TEST(PieceReader, RefusesPiecesThatOverlap) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "a");
  auto manifest = saved(folder / "a", {.name = "w", .shape = {1000}, .shards = 2});
  auto& pieces = manifest.tensors.front().pieces;
  pieces[1].region = pieces[0].region;
  PieceReader reader(archive::file_system(), folder / "a", manifest);
  std::vector<std::byte> bytes(8000);
  const std::vector<Wanted> wanted{{&manifest.tensors.front(), layout::whole({1000}), bytes}};
  for (int times = 0; times < 2; ++times) {
    EXPECT_THROW(reader.read(wanted, [] {}), base::FormatError);
    EXPECT_THROW(reader.read(manifest.tensors.front(), 0, bytes), base::FormatError);
  }
}

}  // namespace
}  // namespace lamina::checkpoint
