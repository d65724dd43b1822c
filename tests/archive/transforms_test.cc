// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <cstring>

#include "lamina/archive/diff.h"
#include "lamina/archive/floats.h"
#include "lamina/archive/merge.h"
#include "lamina/archive/reshard.h"
#include "lamina/archive/safetensors.h"
#include "lamina/archive/verify.h"
#include "lamina/archive/whole_model.h"
#include "lamina/base/error.h"
#include "tests/archive/any_checkpoint.h"
#include "tests/archive/checkpoints.h"
#include "tests/archive/simulated_files.h"
#include "tests/message_of.h"

namespace lamina::archive::testing {
namespace {

using layout::DType;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const MergeProgress kNoProgress = [](auto, auto) {};

RC_GTEST_PROP(PieceReader, MakesTensorsOfPiecesOfAnyLayout, ()) {
  SimulatedFiles files;
  const auto tensors = save_any(files, "/c", "a");
  const auto found = Store(files, "/c").find("a");
  RC_ASSERT(tensors_of(files, found) == tensors);
  PieceReader reader(files, found.folder, found.manifest);
  const auto& tensor = found.manifest.tensors.front();
  const auto begin = *rc::gen::inRange<std::int64_t>(0, layout::numel(tensor.shape) + 1);
  const auto count = *rc::gen::inRange<std::int64_t>(0, layout::numel(tensor.shape) - begin + 1);
  const auto size = element_bytes(tensor.dtype);
  std::vector<std::byte> part(static_cast<std::size_t>(count) * size);
  reader.read(tensor, begin, part);
  const auto* expected = tensors.at(describe(tensor)).data() + static_cast<std::size_t>(begin) * size;
  RC_ASSERT(std::equal(part.begin(), part.end(), expected));
}

RC_GTEST_PROP(Reshard, KeepsAllTensorsHoweverManyWriters, ()) {
  SimulatedFiles files;
  const auto tensors = save_any(files, "/c", "a");
  const auto from = Store(files, "/c").find("a");
  const auto writers = *rc::gen::inRange<std::size_t>(1, 9);
  const auto made = reshard(files, from, "/other", writers, "id", kNoProgress);
  RC_ASSERT(verify(files, made.folder, kNoProgress).empty());
  RC_ASSERT(tensors_of(files, made) == tensors);
  RC_ASSERT(diff(files, from, made, kNoProgress).empty());
  for (const auto& file : made.manifest.files) {
    if (file.name.ends_with(".safetensors")) read_header(*files.open(made.folder / file.name), file.name);
  }
}

RC_GTEST_PROP(Merge, HasTheWholeModel, ()) {
  SimulatedFiles files;
  const auto tensors = save_any(files, "/c", "a");
  auto from = Store(files, "/c").find("a");
  from.manifest.tensors[0].kind = Kind::kParameter;
  const auto name = from.manifest.tensors[0].name;
  merge(files, from, "/out", {.most_file_bytes = *rc::gen::inRange<std::uint64_t>(1, 100)}, kNoProgress);
  std::size_t met = 0;
  for (const auto& file : files.list("/out")) {
    if (!file.name.ends_with(".safetensors")) continue;
    const auto input = files.open(Path("/out") / file.name);
    for (const auto& entry : read_header(*input, file.name).entries) {
      std::vector<std::byte> bytes(entry.bytes());
      input->read(entry.begin, bytes);
      for (const auto& tensor : from.manifest.tensors) {
        if (tensor.name != entry.name) continue;
        RC_ASSERT(tensor.shape == entry.shape && tensor.dtype == entry.dtype);
        RC_ASSERT(tensor.kind == Kind::kParameter || tensor.kind == Kind::kBuffer);
        ++met;
        RC_ASSERT(std::ranges::any_of(tensors, [&](const auto& each) { return each.second == bytes; }));
      }
    }
  }
  RC_ASSERT(std::cmp_equal(met, std::ranges::count_if(from.manifest.tensors, [](const auto& tensor) {
                             return tensor.kind == Kind::kParameter || tensor.kind == Kind::kBuffer;
                           })));
}

std::vector<std::string> names_in(FileSystem& files, const Path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : files.list(folder)) names.push_back(entry.name);
  return names;
}

TEST(Merge, TranslatesNamesByTheFirstPairThatFitsAndCopiesOtherFiles) {
  SimulatedFiles files;
  Store store(files, "/c");
  auto save = store.begin("a", "1", "a test");
  auto manifest = write_files(files, save.folder(), {.names = {"h.0.weight", "h.1.weight", "x"}});
  const std::string config = "{\"model_type\": \"gpt2\"}";
  CheckedOutput output(files.create(save.folder() / "config.json"));
  output.write(bytes_of(config));
  output.finish();
  manifest.files.push_back({"config.json", output.size(), output.checksums()});
  manifest.about["translations"] = nlohmann::json::parse(R"([["h.0.", "first."], ["h.", "transformer.h."]])");
  save.commit(manifest);
  const auto merged = merge(files, store.find("a"), "/out/deep/", {}, kNoProgress);
  EXPECT_EQ(merged.tensors, 3);
  EXPECT_THAT(names_in(files, "/out"), ElementsAre("deep"));
  EXPECT_THAT(names_in(files, "/out/deep"), ElementsAre("config.json", "model.safetensors"));
  const auto header = read_header(*files.open("/out/deep/model.safetensors"), "f");
  std::vector<std::string> names;
  for (const auto& entry : header.entries) names.push_back(entry.name);
  EXPECT_THAT(names, ElementsAre("first.weight", "transformer.h.1.weight", "x"));
  EXPECT_EQ(header.metadata.at("format"), "pt");
  EXPECT_EQ(read_all(files, "/out/deep/config.json", 100), config);
}

TEST(Merge, WritesAnIndexWhereThereAreSeveralFiles) {
  SimulatedFiles files;
  save(files, "/c", "a", {});
  const auto merged = merge(files, Store(files, "/c").find("a"), "/out", {.most_file_bytes = 600}, kNoProgress);
  EXPECT_EQ(merged.files, 2);
  EXPECT_THAT(names_in(files, "/out"), ElementsAre("model-00001-of-00002.safetensors",
                                                   "model-00002-of-00002.safetensors", "model.safetensors.index.json"));
  const auto index = nlohmann::json::parse(read_all(files, "/out/model.safetensors.index.json", 10000));
  EXPECT_EQ(index["metadata"]["total_size"], 2 * 8 * 64);
  EXPECT_EQ(index["weight_map"]["h.1.weight"], "model-00002-of-00002.safetensors");
}

TEST(Merge, HasNoIndexOfTheFilesThatTheCheckpointHad) {
  SimulatedFiles files;
  Store store(files, "/c");
  auto save = store.begin("a", "1", "a test");
  auto manifest = write_files(files, save.folder(), {.names = {"h.0.weight", "h.1.weight"}});
  CheckedOutput output(files.create(save.folder() / kModelIndex));
  output.write(bytes_of(std::string("{}")));
  output.finish();
  manifest.files.push_back({kModelIndex, output.size(), output.checksums()});
  save.commit(manifest);
  merge(files, store.find("a"), "/one", {}, kNoProgress);
  EXPECT_THAT(names_in(files, "/one"), ElementsAre("model.safetensors"));
  merge(files, store.find("a"), "/two", {.most_file_bytes = 600}, kNoProgress);
  EXPECT_THAT(read_all(files, Path("/two") / kModelIndex, 10000), HasSubstr("model-00002-of-00002.safetensors"));
  const auto made = reshard(files, store.find("a"), "/other", 2, "2", kNoProgress);
  EXPECT_THAT(names_in(files, made.folder), ::testing::Not(::testing::Contains(kModelIndex)));
}

TEST(Merge, RefusesWhatItCannotWrite) {
  SimulatedFiles files;
  save(files, "/c", "a", {});
  auto found = Store(files, "/c").find("a");
  files.make_folder("/there");
  EXPECT_THAT(message_of<base::UsageError>([&] { merge(files, found, "/there", {}, kNoProgress); }),
              HasSubstr("is there"));
  EXPECT_THAT(message_of<base::UsageError>([&] { merge(files, found, "/out", {.dtype = DType::kInt8}, kNoProgress); }),
              HasSubstr("int8 is no floating dtype"));
  auto twice = found;
  twice.manifest.about["translations"] = nlohmann::json::parse(R"([["h.0.", "h.1."]])");
  EXPECT_THAT(message_of<base::UsageError>([&] { merge(files, twice, "/out", {}, kNoProgress); }),
              HasSubstr("would be called h.1.weight"));
  auto none = found;
  for (auto& tensor : none.manifest.tensors) tensor.kind = Kind::kState;
  EXPECT_THAT(message_of<base::UsageError>([&] { merge(files, none, "/out", {}, kNoProgress); }),
              HasSubstr("no parameters"));
  EXPECT_THAT(names_in(files, "/"), ElementsAre("c", "there"));
}

TEST(Merge, OfADamagedCheckpointLeavesNothingAndNamesTensorAndFile) {
  SimulatedFiles files;
  save(files, "/c", "a", {});
  const auto found = Store(files, "/c").find("a");
  const auto path = found.folder / "model-00003.safetensors";
  auto text = read_all(files, path, ~0ULL);
  text.back() ^= 1;
  files.remove(path);
  files.create(path)->write(bytes_of(text));
  const auto words = message_of<base::FormatError>([&] { merge(files, found, "/out", {}, kNoProgress); });
  EXPECT_THAT(words, ::testing::AllOf(HasSubstr(path.string()), HasSubstr("(h.0.weight)")));
  EXPECT_THAT(names_in(files, "/"), ElementsAre("c"));
  EXPECT_THROW(reshard(files, found, "/other", 2, "id", kNoProgress), base::FormatError);
  EXPECT_THAT(names_in(files, "/other"), IsEmpty());
}

TEST(Merge, EndedAtAnyOperationLeavesTheWholeFolderOrNone) {
  SimulatedFiles counted;
  save(counted, "/c", "a", {});
  const auto found = Store(counted, "/c").find("a");
  counted.kill_at(~0ULL);
  merge(counted, found, "/out", {}, kNoProgress);
  for (std::uint64_t at = 0; at < counted.operations(); ++at) {
    SimulatedFiles files;
    save(files, "/c", "a", {});
    files.kill_at(at);
    EXPECT_THROW(merge(files, found, "/out", {}, kNoProgress), Killed);
    files.cut_power(at);
    if (files.list("/out").empty()) merge(files, found, "/out", {}, kNoProgress);
    EXPECT_EQ(read_header(*files.open("/out/model.safetensors"), "f").entries.size(), 2);
    const auto names = names_in(files, "/");
    EXPECT_TRUE(std::ranges::none_of(names, [](const auto& name) { return name.ends_with(".tmp"); }));
  }
}

TEST(Merge, LeavesFilesOfOthersBesideItsFolder) {
  SimulatedFiles files;
  save(files, "/c", "a", {});
  files.make_folder("/out.tmp");
  files.create("/out.lock")->write(bytes_of("mine"));
  merge(files, Store(files, "/c").find("a"), "/out", {}, kNoProgress);
  EXPECT_THAT(names_in(files, "/"), ElementsAre("c", "out", "out.lock", "out.tmp"));
}

// Floats that are hard to round, and their bits as bfloat16 and float16.
TEST(Convert, RoundsAsTorchDoes) {
  const std::vector<float> floats{1.0F,     -0.0F, 1.00390625F, 1.01171875F, 65504.0F,
                                  65520.0F, 1e-8F, INFINITY,    NAN,         0.1F};
  const auto bits_of = [&](DType dtype) {
    std::vector<std::byte> bytes;
    const auto too_large = convert(DType::kFloat32, std::as_bytes(std::span(floats)), dtype, bytes);
    EXPECT_EQ(too_large, dtype == DType::kFloat16 ? 1 : 0);  // 65520
    std::vector<std::uint16_t> bits(floats.size());
    std::memcpy(bits.data(), bytes.data(), bytes.size());
    return bits;
  };
  EXPECT_THAT(bits_of(DType::kBFloat16),
              ElementsAre(0x3f80, 0x8000, 0x3f80, 0x3f82, 0x4780, 0x4780, 0x322c, 0x7f80, 0x7fc0, 0x3dcd));
  EXPECT_THAT(bits_of(DType::kFloat16),
              ElementsAre(0x3c00, 0x8000, 0x3c04, 0x3c0c, 0x7bff, 0x7c00, 0x0000, 0x7c00, 0x7e00, 0x2e66));
}

TEST(Convert, IsTakenByAMerge) {
  SimulatedFiles files;
  const std::vector<float> floats{1.0F, 2.5F};
  Store store(files, "/c");
  auto save = store.begin("a", "1", "a test");
  CheckedOutput output(files.create(save.folder() / "f"));
  output.write(std::as_bytes(std::span(floats)));
  output.finish();
  Manifest manifest{.files = {{"f", 8, output.checksums()}}};
  manifest.tensors.push_back({.name = "w", .shape = {2}, .pieces = {{0, 0, layout::whole({2})}}});
  save.commit(manifest);
  merge(files, store.find("a"), "/out", {.dtype = DType::kBFloat16}, kNoProgress);
  const auto input = files.open("/out/model.safetensors");
  const auto entry = read_header(*input, "f").entries.at(0);
  EXPECT_EQ(entry.dtype, DType::kBFloat16);
  std::uint16_t bits[2];
  input->read(entry.begin, std::as_writable_bytes(std::span(bits)));
  EXPECT_THAT(bits, ElementsAre(0x3f80, 0x4020));
}

TEST(Diff, NamesWhatDiffersAndByHowMuch) {
  SimulatedFiles files;
  const auto save_floats = [&](const std::string& tag, std::vector<float> floats, nlohmann::json about) {
    Store store(files, "/c");
    auto save = store.begin(tag, "1", "a test");
    CheckedOutput output(files.create(save.folder() / "f"));
    output.write(std::as_bytes(std::span(floats)));
    output.finish();
    Manifest manifest{.files = {{"f", output.size(), output.checksums()}}, .about = std::move(about)};
    const auto size = std::ssize(floats);
    manifest.tensors.push_back({.name = "w", .shape = {size}, .pieces = {{0, 0, layout::whole({size})}}});
    manifest.tensors.push_back({.name = "only " + tag, .shape = {0}});
    save.commit(manifest);
    return store.find(tag);
  };
  const auto differences = [&](std::vector<float> one, std::vector<float> other) {
    return diff(files, save_floats("a", one, {{"counters", {{"step", 1}}}, {"saved_at", 1}}),
                save_floats("b", other, {{"counters", {{"step", 2}}}, {"saved_at", 2}}), kNoProgress);
  };
  auto found = differences({1, 2, 3, INFINITY}, {1, 2.5, 2, INFINITY});
  ASSERT_EQ(found.size(), 4);
  EXPECT_EQ(found[0].what + ": " + found[0].how, "only a: only in the first");
  EXPECT_EQ(found[1].what + ": " + found[1].how, "w: 2 of 4 elements");
  EXPECT_EQ(found[1].largest, 1.0);
  EXPECT_EQ(found[2].what + ": " + found[2].how, "only b: only in the second");
  EXPECT_EQ(found[3].what + ": " + found[3].how, "about/counters/step: 1 and 2");
  found = differences({1, 2}, {1, NAN});
  EXPECT_TRUE(std::isnan(*found[1].largest));
  found = differences({1, 2}, {1, 2, 3});
  EXPECT_EQ(found[1].how, "shape (2) and (3)");
  EXPECT_EQ(differences({1, NAN}, {1, NAN}).size(), 3);  // the same bytes
}

TEST(FindCheckpoint, TakesAFolderOfOneOrOfSeveral) {
  SimulatedFiles files;
  save(files, "/c", "a", {.seed = 1});
  save(files, "/c", "b", {.seed = 2});
  const auto id = [&](const Path& path, const std::string& tag) {
    return find_checkpoint(files, path, tag, [](const auto&) {}).manifest.id;
  };
  EXPECT_EQ(id("/c", ""), "id2");
  EXPECT_EQ(id("/c/", "a"), "id1");
  EXPECT_EQ(id("/c/a_partial", ""), "id1");
  EXPECT_EQ(id("/c/a_partial/", ""), "id1");
  EXPECT_EQ(find_checkpoint(files, "/c/a_partial", "", [](const auto&) {}).tag, "a");
  EXPECT_THAT(message_of<base::UsageError>([&] { id("/c/a_partial", "a"); }), HasSubstr("is one checkpoint"));
  EXPECT_THAT(message_of<base::UsageError>([&] { id("/nowhere", ""); }), HasSubstr("/nowhere: no checkpoint"));
}

}  // namespace
}  // namespace lamina::archive::testing
