// SPDX-License-Identifier: Apache-2.0
#include "lamina/checkpoint/tree_json.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <limits>

#include "lamina/base/error.h"
#include "tests/message_of.h"

namespace lamina::checkpoint {
namespace {

using value::Dict;
using value::List;
using value::Tuple;
using value::Value;
using Json = nlohmann::json;

constexpr std::int64_t kOne = 1, kTwo = 2, kThree = 3, kFive = 5;

Json written(const Value& tree) {
  std::vector<at::Tensor> tensors;
  return to_json(tree, tensors, /*allow_objects=*/false);
}

// Reads what is written of a tree; written again, that is the same.
Value read(const Value& tree, bool allow_objects = false) {
  std::vector<at::Tensor> tensors;
  const auto json = to_json(tree, tensors, allow_objects);
  const auto parsed = Json::parse(json.dump());
  auto found = to_value(parsed, [&](std::size_t place) { return tensors.at(place); }, allow_objects);
  std::vector<at::Tensor> again;
  EXPECT_EQ(to_json(found, again, allow_objects), json);
  EXPECT_EQ(again.size(), tensors.size());
  return found;
}

void refused(const char* json) {
  const auto none = [](std::size_t) -> at::Tensor { throw base::FormatError("there is none"); };
  EXPECT_THROW(to_value(Json::parse(json), none, false), base::FormatError) << json;
}

TEST(TreeJson, KeepsEveryKindOfValue) {
  EXPECT_TRUE(read(value::None{}).get_if<value::None>());
  EXPECT_EQ(read(true).as<bool>(), true);
  EXPECT_EQ(read(std::numeric_limits<std::int64_t>::min()).as<std::int64_t>(),
            std::numeric_limits<std::int64_t>::min());
  EXPECT_EQ(read(0.1).as<double>(), 0.1);
  EXPECT_TRUE(std::signbit(read(-0.0).as<double>()));
  EXPECT_TRUE(std::isnan(read(std::numeric_limits<double>::quiet_NaN()).as<double>()));
  EXPECT_EQ(read(-std::numeric_limits<double>::infinity()).as<double>(), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(read(1.0).as<double>(), 1.0);  // no integer
  EXPECT_EQ(read("grüße").as<std::string>(), "grüße");
  EXPECT_EQ(read(std::string("\xff\x00", 2)).as<std::string>(), std::string("\xff\x00", 2));
  EXPECT_EQ(read(at::kBFloat16).as<at::ScalarType>(), at::kBFloat16);
  EXPECT_EQ(*read(at::Device("cpu")).get_if<at::Device>(), at::Device("cpu"));
  EXPECT_EQ(read(Tuple{{kOne, List{{2.5, "x"}}}}).as<Tuple>().items.size(), 2U);
  EXPECT_TRUE(at::equal(read(at::arange(3)).as<at::Tensor>(), at::arange(3)));
  EXPECT_EQ(read(value::Slice{{kOne, value::None{}, kTwo}}).as<value::Slice>().bounds.size(), 3U);
}

TEST(TreeJson, KeepsKeysThatAreNoTextAndTheOrderOfAll) {
  const auto dict = read(Dict{{{"b", kOne}, {"a", kTwo}}}).as<Dict>();
  EXPECT_EQ(dict.items.front().first.as<std::string>(), "b");
  const auto keyed = read(Dict{{{Tuple{{kOne, kTwo}}, "pair"}, {kThree, "three"}}}).as<Dict>();
  EXPECT_EQ(keyed.items.at(1).first.as<std::int64_t>(), 3);
}

TEST(TreeJson, TakesNoDictionaryForAMark) {
  const auto dict = read(Dict{{{"tensor", kFive}}}).as<Dict>();
  EXPECT_EQ(dict.items.front().second.as<std::int64_t>(), 5);
  EXPECT_EQ(written(Dict{{{"a", kOne}, {"tensor", kFive}}}), (Json{{"a", 1}, {"tensor", 5}}));  // two keys are no mark
}

TEST(TreeJson, ObjectsGoThroughOnlyWhereBothSidesSaySo) {
  const Value object = value::Opaque{"python", std::string("\x80\x05N.", 4), {at::arange(2)}};
  EXPECT_THROW(written(object), base::UsageError);
  EXPECT_EQ(read(object, true).as<value::Opaque>().bytes, std::string("\x80\x05N.", 4));
  std::vector<at::Tensor> tensors;
  const auto json = to_json(object, tensors, true);
  EXPECT_THROW(to_value(json, [&](std::size_t i) { return tensors[i]; }, false), base::UsageError);
}

TEST(TreeJson, RefusesWhatItDoesNotWrite) {
  for (const auto* json : {R"({"tuple": 1})", R"({"float": "many"})", R"({"dtype": "float7"})", R"({"device": "moon"})",
                           R"({"tensor": "0"})", R"({"tensor": 0})", R"({"bytes": "0"})", R"({"bytes": "zz"})",
                           R"({"slice": [1]})", R"({"dict": [[1]]})", R"({"dict": [1]})", "18446744073709551615"}) {
    refused(json);
  }
}

}  // namespace
}  // namespace lamina::checkpoint
