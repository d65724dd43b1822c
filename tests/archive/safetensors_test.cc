// SPDX-License-Identifier: Apache-2.0
#include "lamina/archive/safetensors.h"

#include <gmock/gmock.h>
#include <rapidcheck/gtest.h>

#include "lamina/base/error.h"
#include "tests/archive/simulated_files.h"
#include "tests/layout/any_layout.h"
#include "tests/message_of.h"

namespace lamina::archive::testing {
namespace {

using ::testing::HasSubstr;

// The header of a file that has this one and so many bytes behind it.
Header read(const std::string& header, std::uint64_t bytes) {
  SimulatedFiles files;
  const auto text = header + std::string(bytes, '\0');
  files.create("/f")->write(std::as_bytes(std::span(text)));
  return read_header(*files.open("/f"), "f");
}

std::string sized(const std::string& json) {
  const std::uint64_t size = json.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + json;
}

std::string error_of(const std::string& json, std::uint64_t bytes = 0) {
  return message_of<base::FormatError>([&] { read(sized(json), bytes); });
}

RC_GTEST_PROP(SafetensorsHeader, HasWhatWasWritten, ()) {
  std::vector<Entry> entries;
  const auto count = *rc::gen::inRange(0, 8);
  for (int i = 0; i < count; ++i) {
    const auto name =
        std::to_string(i) + *rc::gen::container<std::string>(rc::gen::elementOf(std::string("ab.\"\\\n ")));
    auto dtype = layout::DType::kFloat32;
    do dtype = static_cast<layout::DType>(*rc::gen::inRange(0, 24));
    while (safetensors_name(dtype).empty());
    entries.push_back({.name = name, .dtype = dtype, .shape = layout::any_shape()});
  }
  const std::map<std::string, std::string> metadata{{"format", "pt"}, {"a\"", "\n"}};
  const auto text = make_header(entries, metadata);
  RC_ASSERT(text.size() % 8 == 0);
  const auto bytes = entries.empty() ? 0 : entries.back().end - text.size();
  const auto header = read(text, bytes);
  RC_ASSERT(header.entries == entries);
  RC_ASSERT(header.metadata == metadata);
}

TEST(SafetensorsHeader, IsNotWrittenOfWhatTheFormatHasNot) {
  const auto error = [](std::vector<Entry> entries) {
    return message_of<base::UsageError>([&] { make_header(entries); });
  };
  EXPECT_THAT(error({{.name = "w", .dtype = layout::DType::kQInt8}}), HasSubstr("w"));
  EXPECT_THAT(error({{.name = "w"}, {.name = "w"}}), HasSubstr("w"));
  EXPECT_THAT(error({{.name = "__metadata__"}}), HasSubstr("__metadata__"));
  EXPECT_THAT(error({{.name = "\xff"}}), HasSubstr("UTF-8"));
}

constexpr auto kTwo =
    R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[],"data_offsets":[3,7]}})";

TEST(SafetensorsHeader, OfOthersIsReadInOrderOfPlaces) {
  const auto header = read(sized(R"({"b":{"data_offsets":[3,7],"shape":[],"dtype":"F32"},"__metadata__":{"x":"y"},)"
                                 R"("a":{"dtype":"U8","shape":[3,1],"data_offsets":[0,3]}}   )"),
                           7);
  ASSERT_EQ(header.entries.size(), 2);
  EXPECT_EQ(header.entries[0].name, "a");
  EXPECT_EQ(header.entries[1].bytes(), 4);
  EXPECT_EQ(header.metadata.at("x"), "y");
}

TEST(SafetensorsHeader, ThatIsNoneIsRefusedWithTheName) {
  EXPECT_EQ(read(sized(kTwo), 7).entries.size(), 2);
  EXPECT_THAT(error_of(kTwo, 6), HasSubstr("f: "));
  EXPECT_THAT(error_of(kTwo, 8), HasSubstr("where its header speaks of"));
  EXPECT_THROW(read("1234567", 0), base::FormatError);
  EXPECT_THROW(read("", 0), base::FormatError);
  for (const std::uint64_t size :
       {std::uint64_t{1}, std::uint64_t{99}, kMostHeaderBytes + 1, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    const std::string text(reinterpret_cast<const char*>(&size), sizeof(size));
    EXPECT_THROW(read(text + "{}", 0), base::FormatError) << size;
  }
  for (const auto* json :
       {"", "{", "[]", "1", "null", "\"a\"", "{}}", "{\"a\":1}", "{\"a\":[]}", "{\"a\":{}}", "{\"a\":null}",
        "{\"__metadata__\":{\"a\":1}}", "{\"__metadata__\":{\"a\":{}}}", "{\"__metadata__\":\"a\"}"}) {
    EXPECT_THAT(error_of(json), HasSubstr("f: ")) << json;
  }
  const auto tensor = [](const std::string& text) { return "{\"a\":{" + text + "}}"; };
  EXPECT_THAT(error_of(tensor(R"("dtype":"F33","shape":[],"data_offsets":[0,4])"), 4), HasSubstr("F33"));
  EXPECT_THAT(error_of(tensor(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), 4), HasSubstr("-1"));
  EXPECT_THAT(error_of(tensor(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), 4), HasSubstr("1.0"));
  EXPECT_THAT(error_of(tensor(R"("dtype":"F32","shape":[[1]],"data_offsets":[0,4])"), 4), HasSubstr("a list"));
  EXPECT_THAT(error_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,5])"), 4), HasSubstr("5"));
  EXPECT_THAT(error_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), 4), HasSubstr("\"a\""));
  EXPECT_THAT(error_of(tensor(R"("dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1)"), 4), HasSubstr("1"));
  EXPECT_THAT(error_of(tensor(R"("dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4])"), 4),
              HasSubstr("one of a kind"));
  EXPECT_THAT(error_of(tensor(R"("dtype":"U8","shape":[1152921504606846976,2],"data_offsets":[0,4])"), 4),
              HasSubstr("2^60"));
  EXPECT_THAT(error_of(tensor(R"("dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,4])"), 4),
              HasSubstr("size"));
  EXPECT_THAT(error_of(R"({"__metadata__":{},"__metadata__":{}})"), HasSubstr("twice"));
  EXPECT_THAT(
      error_of(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          2),
      HasSubstr("\"a\" stands there twice"));
  // Two in the same bytes, and a gap between two.
  EXPECT_THAT(
      error_of(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
          3),
      HasSubstr("\"b\""));
  EXPECT_THAT(
      error_of(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
          3),
      HasSubstr("\"b\""));
}

}  // namespace
}  // namespace lamina::archive::testing
