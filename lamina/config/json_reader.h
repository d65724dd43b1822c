// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "lamina/config/scalar.h"

namespace lamina::config {

// An object of the file, read key by key. Every error is a base::ConfigError whose one line begins with where the
// object is and the key, says what stands there, and what is expected.
class JsonReader {
 public:
  using Json = nlohmann::json;

  JsonReader(const Json& json, std::string where);  // `where` is empty for the file itself
  // Later errors say this instead.
  void call_it(std::string where) { where_ = std::move(where); }

  bool has(const std::string& key);  // and it is not null
  const Json& at(const std::string& key);
  double number(const std::string& key, double least, double most);
  std::int64_t integer(const std::string& key, std::int64_t least, std::int64_t most);
  std::string text(const std::string& key);
  bool flag(const std::string& key);
  const Json& list(const std::string& key);
  std::string id(const std::string& key);  // an integer or a string

  // Throws when there are keys that nobody asked for.
  void finish() const;
  [[noreturn]] void refuse(const std::string& key, const std::string& problem) const;

 private:
  const Json& json_;
  std::string where_;
  std::vector<std::string> asked_;
};

// An id as text, or nothing when it is neither an integer nor a string.
std::optional<std::string> as_id(const nlohmann::json& json);

// A value of JSON as one of a key; Unreadable where no key takes it.
Scalar scalar_of(const nlohmann::json& json);

}  // namespace lamina::config
