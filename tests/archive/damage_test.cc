// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "lamina/archive/verify.h"
#include "lamina/base/error.h"
#include "tests/archive/checkpoints.h"
#include "tests/archive/simulated_files.h"

namespace lamina::archive::testing {
namespace {

using ::testing::Contains;
using ::testing::IsEmpty;

const Path kFolder = "/c";

std::vector<std::byte> bytes_in(FileSystem& files, const Path& path) {
  const auto text = read_all(files, path, ~0ULL);
  return bytes_of(text);
}

void put(FileSystem& files, const Path& path, std::span<const std::byte> bytes) {
  files.remove(path);
  files.create(path)->write(bytes);
}

// Two tags, saved by 3 writers, with parts of two tensors in each file, over two blocks; `b` is the later one, and an
// `a` of before is kept apart.
class Damaged : public ::testing::Test {
 protected:
  Damaged() {
    const Saved saved{.writers = 3, .rows = 3 * 1024, .columns = 512};
    auto first = saved, second = saved, third = saved;
    second.seed = 2;
    third.seed = 3;
    save(files_, kFolder, "b", first);
    for (const auto& entry : files_.list(kFolder / "b_partial")) {
      stale_[entry.name] = bytes_in(files_, kFolder / "b_partial" / entry.name);
    }
    save(files_, kFolder, "a", second);
    save(files_, kFolder, "b", third);
    manifest_ = Store(files_, kFolder).find("b").manifest;
  }

  Path path_of(std::size_t file) const { return kFolder / "b_partial" / manifest_.files[file].name; }
  std::vector<Damage> damage() {
    return verify(files_, kFolder / "b_partial", [](auto, auto) {});
  }

  // The tensors with elements in these bytes, by what the test itself wrote.
  std::vector<std::string> tensors_at(std::size_t file, std::uint64_t at) const {
    std::vector<std::string> names;
    for (const auto& tensor : manifest_.tensors) {
      const auto& piece = tensor.pieces[file];
      const auto end = piece.begin + static_cast<std::uint64_t>(piece.region.size);
      if (at >= piece.begin && at < end) names.push_back(tensor.name);
    }
    return names;
  }

  void expect_named(std::size_t file, const std::vector<std::string>& tensors) {
    const auto all = damage();
    ASSERT_THAT(all, ::testing::SizeIs(1));
    EXPECT_EQ(all[0].file, manifest_.files[file].name);
    for (const auto& tensor : tensors) EXPECT_THAT(all[0].tensors, Contains(tensor));
  }

  // A size that is wrong is noticed without reading: the other checkpoint is offered.
  void expect_the_other_one_is_taken() {
    Store store(files_, kFolder);
    EXPECT_THROW(store.find("b"), base::FormatError);
    std::string told;
    EXPECT_EQ(store.newest([&](const auto& text) { told = text; })->tag, "a");
    EXPECT_NE(told.find("a"), std::string::npos);
  }

  SimulatedFiles files_;
  std::map<std::string, std::vector<std::byte>> stale_;
  Manifest manifest_;
  std::mt19937_64 random_{17};
};

TEST_F(Damaged, NothingIsFoundInWhatIsWhole) { EXPECT_THAT(damage(), IsEmpty()); }

TEST_F(Damaged, EachOf1000FlippedBitsIsFoundAndNamed) {
  for (int i = 0; i < 1000; ++i) {
    const auto file = random_() % 3;
    const auto whole = bytes_in(files_, path_of(file));
    auto bytes = whole;
    const auto at = random_() % bytes.size();
    bytes[at] ^= std::byte{1} << random_() % 8;
    put(files_, path_of(file), bytes);
    expect_named(file, tensors_at(file, at));
    put(files_, path_of(file), whole);
  }
  EXPECT_THAT(damage(), IsEmpty());
}

TEST_F(Damaged, EachFlippedBitOfTheManifestIsFoundAndTheOtherOneOffered) {
  const auto path = kFolder / "b_partial" / kManifestName;
  const auto whole = bytes_in(files_, path);
  for (int i = 0; i < 150; ++i) {
    auto bytes = whole;
    bytes[random_() % bytes.size()] ^= std::byte{1} << random_() % 8;
    put(files_, path, bytes);
    ASSERT_THAT(damage(), ::testing::SizeIs(1));
    EXPECT_EQ(damage()[0].file, kManifestName);
    expect_the_other_one_is_taken();
  }
}

TEST_F(Damaged, TruncatedGrownAndMissingFilesAreNamedAndTheOtherOneOffered) {
  for (int i = 0; i < 60; ++i) {
    const auto file = random_() % 3;
    const auto whole = bytes_in(files_, path_of(file));
    auto bytes = whole;
    if (i % 3 == 0) bytes.resize(random_() % bytes.size());
    if (i % 3 == 1) bytes.resize(bytes.size() + 1 + random_() % 1000);
    put(files_, path_of(file), bytes);
    if (i % 3 == 2) files_.remove(path_of(file));
    expect_named(file, {"h.0.weight", "h.1.weight"});
    expect_the_other_one_is_taken();
    put(files_, path_of(file), whole);
  }
}

TEST_F(Damaged, SwappedFilesAreNamed) {
  const auto first = bytes_in(files_, path_of(0)), second = bytes_in(files_, path_of(1));
  put(files_, path_of(0), second);
  put(files_, path_of(1), first);
  std::set<std::string> names;
  for (const auto& each : damage()) names.insert(each.file);
  EXPECT_EQ(names, (std::set<std::string>{"model-00001.safetensors", "model-00002.safetensors"}));
}

TEST_F(Damaged, FilesOfAnOlderSaveAreNamed) {
  for (std::size_t file = 0; file < 3; ++file) {
    const auto now = bytes_in(files_, path_of(file));
    const auto& old = stale_.at(manifest_.files[file].name);
    ASSERT_EQ(old.size(), now.size());
    put(files_, path_of(file), old);
    std::set<std::string> names, tensors;
    for (const auto& each : damage()) {
      names.insert(each.file);
      tensors.insert(each.tensors.begin(), each.tensors.end());
    }
    EXPECT_EQ(names, std::set<std::string>{manifest_.files[file].name});
    EXPECT_EQ(tensors, (std::set<std::string>{"h.0.weight", "h.1.weight"}));
    put(files_, path_of(file), now);
  }
}

TEST_F(Damaged, AManifestOfAnOlderSaveFitsNoFile) {
  put(files_, kFolder / "b_partial" / kManifestName, stale_.at(kManifestName));
  std::set<std::string> names;
  for (const auto& each : damage()) names.insert(each.file);
  EXPECT_EQ(names.size(), 3);
}

TEST_F(Damaged, ExtraFilesAndFoldersAreNamed) {
  put(files_, kFolder / "b_partial/model-00004.safetensors", {});
  files_.make_folder(kFolder / "b_partial/more");
  std::set<std::string> names;
  for (const auto& each : damage()) names.insert(each.file);
  EXPECT_EQ(names, (std::set<std::string>{"model-00004.safetensors", "more"}));
}

TEST_F(Damaged, PiecesThatDoNotMakeATensorAreNamed) {
  auto manifest = manifest_;
  manifest.tensors[1].pieces[1].region = manifest.tensors[1].pieces[0].region;  // the same elements, from other bytes
  put(files_, kFolder / "b_partial" / kManifestName, bytes_of(write_manifest(manifest)));
  const auto all = damage();
  ASSERT_THAT(all, ::testing::SizeIs(1));
  EXPECT_THAT(all[0].tensors, ::testing::ElementsAre("h.1.weight"));
  EXPECT_THAT(all[0].what, ::testing::HasSubstr("in two pieces"));
}

TEST_F(Damaged, ProgressEndsWithAllBytes) {
  std::uint64_t last = 0, all = 0;
  verify(files_, kFolder / "b_partial", [&](auto read, auto of) {
    EXPECT_GT(read, last);
    last = read;
    all = of;
  });
  EXPECT_EQ(last, all);
  EXPECT_GT(all, 2 * 3 * 1024 * 512);
}

}  // namespace
}  // namespace lamina::archive::testing
