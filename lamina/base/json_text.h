// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

namespace lamina::base {

using Json = nlohmann::json;

// Parses JSON that anybody may have written. Most of nlohmann::json, such as dump() and copies, calls itself for each
// level: a text of more than kMostDepth lists in lists would overflow the stack. Throws nlohmann::json::exception.
constexpr int kMostDepth = 100;
nlohmann::json parse_json(std::string_view text);

// Decodes MessagePack likewise.
nlohmann::json parse_msgpack(std::string_view bytes);

}  // namespace lamina::base
