// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/config/scalar.h"

namespace lamina::config {

// The language in which a user wrote a configuration, and reads errors about it.
enum class Notation { kPython, kJson };

struct UserEntry;

// A value of a configuration as its user wrote it.
struct UserValue {
  Scalar value;                                   // Unreadable where it is a dictionary, or nothing that a table reads
  std::string shown;                              // in errors
  std::optional<std::vector<UserEntry>> entries;  // of a dictionary, in their order

  const UserValue* find(std::string_view key) const;
};

struct UserEntry {
  std::string key;
  std::string shown;  // the key in errors
  UserValue value;
};

// Throws ConfigError where the text is no JSON. `source` names it in messages.
UserValue user_value(std::string_view json, std::string_view source);

// A scalar in that language: True or true, 'a' or "a".
std::string show(const Scalar& value, Notation notation);

// In small letters, strings without quotation marks, null as "none": "true" is the word of True and of "true".
std::string word_of(const UserValue& given);

std::string lower(std::string_view text);

// The name that is nearest to what was given, in any case of its letters; "" where none is as much alike, from 0 to 1.
std::string nearest_of(std::string_view given, const std::vector<std::string_view>& names, double least = 0);

}  // namespace lamina::config
