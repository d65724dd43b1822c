// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/convert.h"

#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "lamina/base/error.h"
#include "lamina/foreign/pickle.h"
#include "tests/archive/any_checkpoint.h"
#include "tests/archive/simulated_files.h"
#include "tests/foreign/files.h"
#include "tests/message_of.h"

namespace lamina::foreign::testing {
namespace {

using namespace archive;
using namespace archive::testing;

using ::testing::HasSubstr;
using Type = PickleValue::Type;

const MergeProgress kNoProgress = [](auto, auto) {};

struct Box {
  layout::Shape offsets, sizes;
};

// Cuts a box into two along a random dimension, a few times.
std::vector<Box> any_boxes(const layout::Shape& shape) {
  std::vector<Box> boxes{{layout::Shape(shape.size(), 0), shape}};
  for (int i = *rc::gen::inRange(0, 5); i > 0 && !shape.empty(); --i) {
    const auto which = *rc::gen::inRange<std::size_t>(0, boxes.size());
    const auto d = *rc::gen::inRange<std::size_t>(0, shape.size());
    const auto size = boxes[which].sizes[d];
    if (size < 2) continue;
    const auto cut = *rc::gen::inRange<std::int64_t>(1, size);
    auto rest = boxes[which];
    boxes[which].sizes[d] = cut;
    rest.offsets[d] += cut;
    rest.sizes[d] = size - cut;
    boxes.push_back(rest);
  }
  return boxes;
}

// Elements of a box, by their definition.
std::string elements_of(const layout::Shape& shape, const Box& box, const std::vector<std::byte>& whole) {
  std::string elements;
  for (std::int64_t i = 0; i < std::ssize(whole); ++i) {
    bool inside = true;
    for (auto d = shape.size(), rest = static_cast<std::size_t>(i); d-- > 0;
         rest /= static_cast<std::size_t>(shape[d])) {
      const auto at = static_cast<std::int64_t>(rest) % shape[d];
      inside = inside && at >= box.offsets[d] && at < box.offsets[d] + box.sizes[d];
    }
    if (inside) elements.push_back(static_cast<char>(whole[static_cast<std::size_t>(i)]));
  }
  return elements;
}

std::string sizes_of(const layout::Shape& shape) {
  std::string sizes;
  for (const auto size : shape) sizes += integer(static_cast<std::int32_t>(size));
  return tuple(sizes);
}

RC_GTEST_PROP(DistributedCheckpoint, MakesTensorsOfBoxes, ()) {
  SimulatedFiles files;
  const auto shape = layout::any_shape();
  const auto whole = any_elements(static_cast<std::uint64_t>(layout::numel(shape)), 3);
  const auto boxes = any_boxes(shape);
  std::string chunks, places, bytes;
  for (const auto& box : boxes) {
    const auto elements = elements_of(shape, box, whole);
    const auto file = torch_file(pickle(byte_tensor(box.sizes)), elements);
    chunks += chunk(sizes_of(box.offsets), sizes_of(box.sizes));
    places += place(sizes_of(box.offsets), bytes.size(), file.size());
    bytes += file;
  }
  write_distributed(files, "/d", metadata_of(sizes_of(shape), chunks, places), bytes);
  const auto from = read_distributed_checkpoint(files, "/d");
  const auto made = convert(files, from, "", "/out", "a", "1", kNoProgress);
  RC_ASSERT(tensors_of(files, made) == (Tensors{{"w", whole}}));
  if (whole.empty()) return;
  auto less = from;
  less.tensors.front().pieces.pop_back();
  RC_ASSERT_THROWS_AS(convert(files, less, "", "/out", "b", "2", kNoProgress), base::FormatError);
  RC_ASSERT(files.list("/out").size() == 2);  // the first one, and that it is the newest
}

bool any(std::string_view) { return true; }

std::string pickle_error(std::string_view bytes) {
  return message_of<base::FormatError>([&] { Pickle(bytes, any); });
}

TEST(Pickle, HasTheValuesThatWereWritten) {
  const std::string_view bytes(
      "\x80\x02}q\x00(X\x01\x00\x00\x00"
      "aK\x05X\x01\x00\x00\x00"
      "b](J\xff\xff\xff\xffM\x01\x02\x8a\x02\x00\x80G?\xf8\x00\x00\x00\x00\x00\x00N\x88"
      "eu.",
      63);
  const Pickle pickle(bytes, any);
  ASSERT_TRUE(pickle.root().is(Type::kDict));
  EXPECT_EQ(pickle.root().find("a")->integer, 5);
  const auto& list = pickle.root().find("b")->items;
  ASSERT_EQ(list.size(), 6);
  EXPECT_EQ(list[0]->integer, -1);
  EXPECT_EQ(list[1]->integer, 513);
  EXPECT_EQ(list[2]->integer, -32768);
  EXPECT_EQ(list[3]->real, 1.5);
  EXPECT_TRUE(list[4]->is(Type::kNone));
  EXPECT_EQ(list[5]->integer, 1);
  EXPECT_EQ(pickle.root().find("c"), nullptr);
}

TEST(Pickle, HasNoEntriesOfAnObjectThatIsItsOwnState) {
  const auto recalled = std::string("q\0h\0b", 5);
  const auto bytes = pickle(call(global("torch", "Size"), "") + recalled);
  const Pickle pickle(bytes, any);
  EXPECT_EQ(pickle.root().find("a"), nullptr);
}

TEST(Pickle, RefusesWhatIsNotAllowedAndNamesIt) {
  const auto words = message_of<base::FormatError>(
      [] { Pickle("cos\nsystem\n(X\x02\x00\x00\x00lstR.", [](auto global) { return global == "torch.Size"; }); });
  EXPECT_THAT(words, HasSubstr("names os.system"));
}

TEST(Pickle, RefusesWhatIsNone) {
  for (const std::string_view bytes :
       {"",      ".",    "N",    "]a.",   "(a.", "u.", "(NNNu.", "]e.", "h\x05.", "X\xff\xff\xff\xff",
        "}(Nu.", "NNR.", "NNb.", "\x85.", "t.",  "0.", "q\x01.", "i.",  "cos\n",  "((((("}) {
    EXPECT_THROW(Pickle(bytes, any), base::FormatError) << bytes;
  }
  EXPECT_THAT(pickle_error("(S'a'."), HasSubstr("opcode 83"));
}

TEST(Pickle, OfManyValuesTakesBoundedMemory) {
  EXPECT_THAT(pickle_error(std::string(20'000'000, ']')), HasSubstr("bytes of memory"));
  EXPECT_THAT(pickle_error(std::string(20'000'000, '(')), HasSubstr("bytes of memory"));
  EXPECT_THAT(pickle_error("Nq" + std::string(1, '\0') + std::string(40'000'000, '\x94')),
              HasSubstr("bytes of memory"));
}

TEST(TorchFile, HasTheTensorsInDicts) {
  SimulatedFiles files;
  write_file(files, "/f", torch_file(pickle(dict(text("a") + dict(text("w") + tensor()) + text("n") + integer(3)))));
  const auto found = read_torch_file(files, "/f");
  ASSERT_EQ(found.tensors.size(), 1);
  EXPECT_EQ(found.tensors[0].name, "a.w");
  EXPECT_EQ(found.tensors[0].shape, layout::Shape{2});
  ASSERT_EQ(found.left.size(), 1);
  EXPECT_EQ(found.left[0].name, "n");
}

// Each dict has the one before twice: some hundred bytes name as many values as there is memory for.
TEST(TorchFile, OfDictsThatAreInDictsTwiceTakesBoundedMemory) {
  std::string nested = dict(text("a") + "N");
  for (char depth = 1; depth < 30; ++depth) {
    const std::string same = std::string("q") + depth + "0", again = std::string("h") + depth;
    nested += same + dict(text("a") + again + text("b") + again);
  }
  SimulatedFiles files;
  write_file(files, "/f", torch_file(pickle(nested)));
  EXPECT_THAT(message_of<base::FormatError>([&] { read_torch_file(files, "/f"); }), HasSubstr("bytes of memory"));
}

TEST(DistributedCheckpoint, HasItsTensors) {
  SimulatedFiles files;
  const auto file = torch_file(pickle(tensor()));
  write_distributed(files, "/d", metadata(file.size()), file);
  const auto made = convert(files, read_distributed_checkpoint(files, "/d"), "", "/out", "a", "1", kNoProgress);
  EXPECT_EQ(tensors_of(files, made), (Tensors{{"w", std::vector<std::byte>(8, std::byte('x'))}}));
}

TEST(DistributedCheckpoint, ThatNamesAPartOfATensorTwiceIsRefused) {
  SimulatedFiles files;
  const auto file = torch_file(pickle(tensor()));
  write_distributed(files, "/d", metadata(file.size(), chunk() + chunk()), file);
  EXPECT_THAT(message_of<base::FormatError>([&] { read_distributed_checkpoint(files, "/d"); }),
              HasSubstr("does not say where"));
}

ForeignCheckpoint smp_with(const Pickles& pickles, SimulatedFiles& files) {
  write_smp(files, "/s", pickles);
  return read_smp_checkpoint(files, "/s");
}

std::string smp_error(const Pickles& pickles) {
  SimulatedFiles files;
  return message_of<base::FormatError>([&] { smp_with(pickles, files); });
}

// With what a second partition has of its model, and nothing of its optimizer.
Pickles two_partitions(const std::string& model) {
  const auto empty = pickle(dict(""));
  return {
      {"model_1.pt", model}, {"optimizer_1_0_0.pt", empty}, {"fp16_states_1.pt", empty}, {"user_content.pt", empty}};
}

TEST(SmpCheckpoint, WithoutTheFileOfARankIsRefused) {
  const auto empty = pickle(dict(""));
  EXPECT_THAT(smp_error({{"model_2.pt", smp_model()}}), HasSubstr("/s/model_1.pt: the checkpoint has no such file"));
  EXPECT_THAT(smp_error({{"model_1.pt", smp_model()}}), HasSubstr("models of 2 partitions and the optimizers of 1"));
  EXPECT_THAT(smp_error({{"optimizer_0_0_2.pt", empty}}), HasSubstr("/s/optimizer_0_0_1.pt"));
  EXPECT_THAT(smp_error({{"optimizer_0_0_1.pt", empty}}), HasSubstr("2 files optimizer_*.pt and 1 fp16_states_*.pt"));
}

TEST(SmpCheckpoint, SaysWhyItsOptimizerIsOfNoUse) {
  SimulatedFiles files;
  const auto by_number =
      dict(text("param_groups") + list(dict(text("lr") + integer(1) + text("params") + list(integer(0)))));
  const auto found = smp_with({{"optimizer_0_0_0.pt", pickle(by_number)}}, files);
  EXPECT_TRUE(found.about.contains("no_optimizer"));
  const auto by_name =
      dict(text("param_groups") + list(dict(text("lr") + integer(1) + text("params") + list(text("w")))));
  SimulatedFiles others;
  EXPECT_FALSE(smp_with({{"optimizer_0_0_0.pt", pickle(by_name)}}, others).about.contains("no_optimizer"));
}

TEST(SmpCheckpoint, IsFoundByTagByTheNameOfTheNewestAndByItself) {
  SimulatedFiles files;
  write_smp(files, "/c/a_partial");
  EXPECT_TRUE(find_smp_checkpoint(files, "/c", "a") == Path("/c/a_partial"));
  EXPECT_TRUE(find_smp_checkpoint(files, "/c", "a_partial") == Path("/c/a_partial"));
  EXPECT_TRUE(find_smp_checkpoint(files, "/c", "b") == std::nullopt);
  EXPECT_TRUE(find_smp_checkpoint(files, "/c", {}) == std::nullopt);
  EXPECT_TRUE(find_smp_checkpoint(files, "/c/a_partial", {}) == Path("/c/a_partial"));
  write_file(files, "/c/newest", "elsewhere/a_partial\n");
  EXPECT_TRUE(find_smp_checkpoint(files, "/c", {}) == Path("/c/a_partial"));
}

TEST(SmpCheckpoint, IsNoFolderOfCheckpointsWithAFileOfTheUsers) {
  SimulatedFiles files;
  write_smp(files, "/c");
  write_smp(files, "/c/b");
  EXPECT_TRUE(find_smp_checkpoint(files, "/c", {}) == Path("/c"));
  EXPECT_TRUE(find_smp_checkpoint(files, "/c", "b") == Path("/c/b"));
  files.make_folder("/c/b_partial");  // of lamina's own form
  write_file(files, "/c/newest", "b_partial");
  EXPECT_TRUE(find_smp_checkpoint(files, "/c", {}) == std::nullopt);
  EXPECT_TRUE(find_smp_checkpoint(files, "/c", "b") == std::nullopt);
}

TEST(SmpCheckpoint, HasExtraStatesThatAreTensorsAsContent) {
  SimulatedFiles files;
  const auto model =
      dict(text("w") + tensor() + text("_extra_state") + integer(3) + text("a._extra_state") + tensor(1));
  const auto found = smp_with({{"model_0.pt", pickle(model)}}, files);
  EXPECT_EQ(found.about.at("extra_state"), nlohmann::json::parse(R"({"": 3, "a": {"tensor": 0}})"));
  const auto* content = found.find("content/0");
  ASSERT_NE(content, nullptr);
  EXPECT_EQ(content->kind, Kind::kContent);
  EXPECT_EQ(found.find("a._extra_state"), nullptr);
}

TEST(SmpCheckpoint, WithATransposedTensorHasItRowByRow) {
  SimulatedFiles files;
  const auto transposed = rebuilt(storage("ByteStorage", 8), integer(4) + integer(2), integer(1) + integer(4));
  const auto model = torch_file(pickle(dict(text("module") + dict(text("t") + transposed))), "01234567");
  files.make_folder("/s");
  write_file(files, "/s/model_0.pt", model);
  const auto found = read_smp_checkpoint(files, "/s");
  ASSERT_EQ(found.tensors.size(), 1);
  PieceReader reader(files, found.folder, found);
  std::string bytes(8, ' ');
  reader.read(found.tensors.at(0), 0, std::as_writable_bytes(std::span(bytes)));
  EXPECT_EQ(bytes, "04152637");
}

// The flat group and the state are one tensor in that file.
TEST(SmpCheckpoint, HasStatesThatAreOneTensorWithOthers) {
  SimulatedFiles files;
  const auto made = convert(files, smp_with({}, files), "", "/out", "a", "1", kNoProgress);
  std::set<std::string> states;
  for (const auto& each : made.manifest.tensors) states.insert(each.state);
  EXPECT_THAT(states, ::testing::IsSupersetOf({"exp_avg", "step#"}));
}

TEST(SmpCheckpoint, KeepsNamesThatOnlyALaterPartitionHasOfATensor) {
  SimulatedFiles files;
  const auto found = smp_with(two_partitions(smp_model(text("w") + tensor() + text("tied") + tensor())), files);
  ASSERT_NE(found.find("w"), nullptr);
  EXPECT_THAT(found.find("w")->also, ::testing::ElementsAre("tied"));
}

TEST(SmpCheckpoint, WithATensorOfTwoShapesIsRefused) {
  const auto module = pickle(dict(text("module") + dict(text("w") + tensor(1))));
  EXPECT_THAT(smp_error(two_partitions(module)), HasSubstr("w has another shape or dtype in model_1.pt"));
}

TEST(SmpCheckpoint, WithoutAPartOfATensorIsRefused) {
  const auto master = pickle(dict(text("masters") + dict(text("w") + tensor(1))));
  EXPECT_THAT(smp_error({{"fp16_states_0.pt", master}}),
              HasSubstr("parts of master of w have 1 elements, and it has 2"));
}

TEST(SmpCheckpoint, WithShapesThatNoTensorHasIsRefused) {
  EXPECT_THAT(smp_error({{"user_content.pt", smp_content(text("w") + tuple(integer(-2)))}}), HasSubstr("param_shapes"));
}

TEST(SmpCheckpoint, TakesATensorInAndOutsideItsModule) {
  SimulatedFiles files;
  const auto both = pickle(dict(text("module") + dict(text("w") + tensor()) + text("x") + tensor()));
  const auto found = smp_with({{"model_0.pt", both}}, files);
  ASSERT_NE(found.find("module.w"), nullptr);
  EXPECT_THAT(found.find("module.w")->also, ::testing::ElementsAre("x"));
}

}  // namespace
}  // namespace lamina::foreign::testing
