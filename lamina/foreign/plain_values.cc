// SPDX-License-Identifier: Apache-2.0
#include "lamina/foreign/plain_values.h"

#include <algorithm>
#include <cmath>

#include "lamina/base/error.h"
#include "lamina/foreign/torch_dtype.h"

namespace lamina::foreign {
namespace {

using nlohmann::json;

constexpr int kMostDepth = 32;

[[noreturn]] void refuse() { throw base::FormatError("a value that is not plain"); }

std::vector<const PickleValue*> keys_of(const PickleValue& dict) {
  std::vector<const PickleValue*> keys;
  for (std::size_t i = 0; i < dict.items.size(); i += 2) keys.push_back(dict.items[i]);
  return keys;
}

}  // namespace

std::optional<json> PlainValues::of(const PickleValue& value) {
  try {
    auto written = write(value, 0);
    written.dump();  // throws for what is no UTF-8
    return written;
  } catch (const base::FormatError&) {
    return std::nullopt;
  } catch (const json::exception&) {
    return std::nullopt;
  }
}

json PlainValues::write(const PickleValue& value, int depth) {
  constexpr std::uint64_t kValue = 64;
  budget_.take(kValue + value.text.size());
  if (depth > kMostDepth) refuse();
  const auto list = [&](const PickleValue& of) {
    auto items = json::array();
    for (const auto* item : of.items) items.push_back(write(*item, depth + 1));
    return items;
  };
  switch (value.type) {
    case PickleValue::Type::kNone:
      return nullptr;
    case PickleValue::Type::kBool:
      return value.integer != 0;
    case PickleValue::Type::kInteger:
      return value.integer;
    case PickleValue::Type::kFloat:
      if (std::isfinite(value.real)) return value.real;
      return {{"float", std::isnan(value.real) ? "nan" : value.real > 0 ? "inf" : "-inf"}};
    case PickleValue::Type::kText:
      return value.text;
    case PickleValue::Type::kList:
      return list(value);
    case PickleValue::Type::kTuple:
      return {{"tuple", list(value)}};
    case PickleValue::Type::kObject:
      if (const auto shape = shape_of(value)) return {{"tuple", *shape}};
      refuse();
    case PickleValue::Type::kDict: {
      const auto keys = keys_of(value);
      const bool is_object =
          keys.size() != 1 &&
          std::ranges::all_of(keys, [](const auto* key) { return key->is(PickleValue::Type::kText); }) &&
          std::ranges::is_sorted(keys, {}, [](const auto* key) { return key->text; });
      auto object = json::object(), pairs = json::array();
      for (std::size_t i = 0; i < value.items.size(); i += 2) {
        auto written = write(*value.items[i + 1], depth + 1);
        if (is_object) {
          object[value.items[i]->text] = std::move(written);
        } else {
          pairs.push_back(json::array({write(*value.items[i], depth + 1), std::move(written)}));
        }
      }
      return is_object ? object : json{{"dict", std::move(pairs)}};
    }
    default:
      refuse();
  }
}

std::vector<std::pair<std::string, nlohmann::json>> pairs_of(const nlohmann::json& dict) {
  std::vector<std::pair<std::string, nlohmann::json>> pairs;
  const auto refuse = [] { throw base::FormatError("a dict with keys that are no names"); };
  if (!dict.is_object()) refuse();
  if (dict.size() != 1 || !dict.contains("dict")) {
    for (const auto& [key, value] : dict.items()) pairs.emplace_back(key, value);
    return pairs;
  }
  for (const auto& pair : dict["dict"]) {
    if (!pair.at(0).is_string()) refuse();
    pairs.emplace_back(pair.at(0).get<std::string>(), pair.at(1));
  }
  return pairs;
}

nlohmann::json as_object(const nlohmann::json& dict) {
  auto object = nlohmann::json::object();
  for (auto& [key, value] : pairs_of(dict)) object[key] = std::move(value);
  return object;
}

}  // namespace lamina::foreign
