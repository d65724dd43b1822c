// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/manifest.h"

#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include <limits>

#include "lamina/base/error.h"
#include "tests/archive/any_manifest.h"
#include "tests/message_of.h"

namespace lamina::archive::testing {
namespace {

using ::testing::HasSubstr;

RC_GTEST_PROP(ManifestText, HasWhatWasWritten, ()) {
  const auto manifest = any_manifest();
  RC_ASSERT(read_manifest(write_manifest(manifest)) == manifest);
}

RC_GTEST_PROP(ManifestText, WithAnyDamageIsRefused, ()) {
  const auto whole = write_manifest(any_manifest());
  auto text = whole;
  const auto at = *rc::gen::inRange<std::size_t>(0, text.size());
  switch (*rc::gen::inRange(0, 4)) {
    case 0:
      text[at] = static_cast<char>(text[at] ^ (1 << *rc::gen::inRange(0, 8)));
      break;
    case 1:
      text.resize(at);
      break;
    case 2:
      text.erase(at, 1 + *rc::gen::inRange<std::size_t>(0, 10));
      break;
    default:
      text.insert(at, text.substr(at / 2, 1 + *rc::gen::inRange<std::size_t>(0, 10)));
  }
  if (text != whole) RC_ASSERT_THROWS_AS(read_manifest(text), base::FormatError);
}

RC_GTEST_PROP(Pieces, OfALayoutHaveEachElementOnce, ()) {
  std::vector<DataFile> files{{"f", 0, {}}};
  auto tensor = any_tensor("a", files);
  RC_ASSERT(pieces_problem(tensor) == "");
  if (layout::numel(tensor.shape) == 0) return;
  const auto which = *rc::gen::inRange<std::size_t>(0, tensor.pieces.size());
  auto twice = tensor;
  twice.pieces.push_back(tensor.pieces[which]);
  RC_ASSERT(pieces_problem(twice).ends_with("in two pieces"));
  tensor.pieces.erase(tensor.pieces.begin() + static_cast<std::ptrdiff_t>(which));
  RC_ASSERT(pieces_problem(tensor).ends_with("in no piece"));
}

// A manifest of one tensor of 4 x 6 bytes in two shards, in a file of 100.
Manifest sample() {
  Manifest manifest{.id = "1", .files = {{"model-00001.safetensors", 100, {7}}}};
  auto first = layout::whole({4, 6}), second = first;
  first.end = second.begin = 12;
  first.size = second.size = 12;
  manifest.tensors.push_back({.name = "h.weight",
                              .dtype = layout::DType::kUInt8,
                              .shape = {4, 6},
                              .pieces = {{0, 8, first}, {0, 20, second}}});
  return manifest;
}

std::string refusal(const std::function<void(Manifest&)>& change) {
  auto manifest = sample();
  change(manifest);
  return message_of<base::UsageError>([&] { write_manifest(manifest); });
}

TEST(ManifestText, IsNotWrittenWhereItWouldBeRefused) {
  EXPECT_NO_THROW(write_manifest(sample()));
  for (const std::string name : {"", ".", "..", "../x", "a/b", "/etc/passwd", "manifest.json"}) {
    EXPECT_THAT(refusal([&](auto& m) { m.files[0].name = name; }), HasSubstr("\"" + name + "\" is no name of a file"));
  }
  EXPECT_THAT(refusal([](auto& m) { m.files[0].checksums.clear(); }), HasSubstr("0 checksums for 100 bytes"));
  EXPECT_THAT(refusal([](auto& m) { m.files.push_back(m.files[0]); }), HasSubstr("twice in the manifest"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors.push_back(m.tensors[0]); }), HasSubstr("h.weight: twice"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].pieces[0].file = 1; }), HasSubstr("h.weight: in file 1 of 1"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].pieces[0].begin = 89; }), HasSubstr("12 bytes at 89 are not in"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].pieces[0].begin = ~0ULL - 4; }), HasSubstr("are not in"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].pieces[0].begin = 9; }), HasSubstr("lie in the same bytes"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].pieces.pop_back(); }), HasSubstr("12 elements are in no file"));
  for (const auto& [begin, end] : {std::pair{12, 25}, {-1, 12}, {13, 12}}) {
    EXPECT_THAT(refusal([&](auto& m) {
                  m.tensors[0].pieces[1].region.begin = begin;
                  m.tensors[0].pieces[1].region.end = end;
                }),
                HasSubstr("a piece that no layout makes"));
  }
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].pieces[0].region.stripes = {{0, 0, 5}}; }), HasSubstr("no layout"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].pieces[0].region.stripes = {{2, 0, 2}, {1, 2, 1}}; }),
              HasSubstr("no layout"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].pieces[0].region.dim = 2; }), HasSubstr("no layout"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].pieces[0].region.whole = {24}; }), HasSubstr("no layout"));
  EXPECT_THAT(refusal([](auto& m) { m.tensors[0].name = "\xff"; }), HasSubstr("not UTF-8"));
  EXPECT_THAT(refusal([](auto& m) { m.about["a"] = std::numeric_limits<double>::infinity(); }), HasSubstr("infinite"));
}

// A text with a right checksum, as an attacker would make it.
std::string signed_text(std::string rest) {
  const auto sum = to_hex({{checksum(std::as_bytes(std::span(rest)))}});
  return "{\"checksum\": \"" + sum + "\",\n" + rest + "\n";
}

std::string error_of(const std::string& rest) {
  return message_of<base::FormatError>([&] { read_manifest(signed_text(rest)); });
}

TEST(ManifestText, OfANewerVersionSaysSoWhateverElseItHas) {
  EXPECT_THAT(error_of(R"("format": "lamina checkpoint", "version": 2, "tensors": [{"new": 1}]})"),
              HasSubstr("its version is 2, and this lamina knows 1: read it with a newer one"));
}

TEST(ManifestText, OfAnotherKindIsRefused) {
  const std::string ours = R"("format": "lamina checkpoint", "version": 1, )";
  const std::string rest = R"("id": "1", "number": 1, "about": {}, )";
  EXPECT_EQ(read_manifest(signed_text(ours + rest + R"("files": [], "tensors": []})")).id, "1");
  EXPECT_THAT(error_of(R"("format": "other", "version": 1, "files": [], "tensors": []})"), HasSubstr("is no manifest"));
  EXPECT_THAT(error_of(R"("files": [{}]})"), HasSubstr("is no manifest"));
  EXPECT_THAT(error_of(ours + rest + R"("files": [[]], "tensors": []})"), HasSubstr("is no list of objects"));
  EXPECT_THAT(error_of(ours + rest + R"("files": [1], "tensors": []})"), HasSubstr("is no list of objects"));
  EXPECT_THAT(error_of(ours + rest + R"("files": [], "tensors": {"a": {}}})"), HasSubstr("tensors"));
  EXPECT_THAT(error_of(ours + rest + R"("files": []})"), HasSubstr("tensors"));
  EXPECT_THAT(error_of(ours + rest + R"("files": [], "tensors": [], "more": 1})"), HasSubstr("more"));
  EXPECT_THAT(error_of(ours + R"("id": "1", "number": -1, "about": {}, "files": [], "tensors": []})"),
              HasSubstr("number"));
  EXPECT_THAT(error_of(ours + R"("id": "1", "number": 1, "about": 3, "files": [], "tensors": []})"),
              HasSubstr("about"));
  EXPECT_THAT(error_of("x"), HasSubstr("not valid JSON"));
  EXPECT_THROW(read_manifest(""), base::FormatError);
  EXPECT_THROW(read_manifest("{}"), base::FormatError);
}

TEST(ManifestText, NamesTheTensorThatIsWrong) {
  const std::string before =
      R"("format": "lamina checkpoint", "version": 1, "id": "1", "number": 1, "about": {}, "files": [],
"tensors": [{"name": "h.weight", "kind": "parameter", "pieces": [], )";
  EXPECT_THAT(error_of(before + R"("dtype": "float33", "shape": [0]}]})"), HasSubstr("h.weight"));
  EXPECT_THAT(error_of(before + R"("dtype": "float32", "shape": [-1]}]})"), HasSubstr("h.weight"));
  EXPECT_THAT(error_of(before + R"("dtype": "float32", "shape": [4294967296, 4294967296]}]})"), HasSubstr("2^60"));
}

}  // namespace
}  // namespace lamina::archive::testing
