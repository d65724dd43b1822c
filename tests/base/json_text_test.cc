// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/json_text.h"

#include <gtest/gtest.h>

#include <string>

namespace lamina::base::testing {
namespace {

using Json = nlohmann::json;

std::string nested(int depth) { return std::string(depth, '[') + std::string(depth, ']'); }

TEST(JsonText, IsParsedToADepth) {
  EXPECT_EQ(parse_json(nested(kMostDepth)), Json::parse(nested(kMostDepth)));
  EXPECT_THROW(parse_json(nested(kMostDepth + 1)), Json::exception);
  EXPECT_THROW(parse_json(std::string(1'000'000, '{')), Json::exception);
  EXPECT_THROW(parse_json("[1"), Json::exception);
}

TEST(JsonText, MayHaveBracketsInWords) {
  const std::string text = "[\"" + std::string(200, '[') + "\\\"" + std::string(200, '{') + "\"]";
  EXPECT_EQ(parse_json(text).at(0).get<std::string>().size(), 401U);
}

TEST(JsonText, OfMessagePackIsDecodedToADepth) {
  std::string fine, deep(1'000'000, '\x91');
  Json::to_msgpack(Json::parse(nested(kMostDepth)), fine);
  EXPECT_EQ(parse_msgpack(fine), Json::parse(nested(kMostDepth)));
  EXPECT_THROW(parse_msgpack(deep), Json::exception);
}

}  // namespace
}  // namespace lamina::base::testing
