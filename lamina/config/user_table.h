// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "lamina/config/config.h"
#include "lamina/config/problems.h"
#include "lamina/config/user_value.h"

namespace lamina::config {

// Findings in a user's configuration.
struct Findings {
  Notation notation = Notation::kPython;
  Problems problems{};
  std::vector<std::string> without_effect{};  // keys that were given, and that change no result
};

// The result of reading one value.
struct Reading {
  std::string problem{};  // without the key; "" where the value is right
  bool has_effect = true;
};

using UserReader = std::function<Reading(const UserValue& given, Notation notation)>;

// Keys that are read alike. What a reader reads into outlives it.
struct UserRow {
  std::vector<std::string_view> keys;
  UserReader read;
};
using UserTable = std::vector<UserRow>;

// Reads a dictionary by a table; what is wrong keeps its default. `where` is its name, for problems.
void read_table(const std::string& where, const UserValue& given, const UserTable& table, Findings& findings);

// The keys of a table.
std::vector<std::string_view> keys_of(const UserTable& table);

// "value is not allowed; expected ..."
Reading refused(const UserValue& given, std::string_view expected);

// A number, which may be a text; nothing where it is none.
std::optional<double> number_of(const UserValue& given);

// Reads a number from `least` to `most`; a whole one where `into` is an integer.
template <class T>
UserReader as_number(T& into, double least, double most = std::numeric_limits<double>::infinity());
UserReader as_flag(bool& into);
// Reads one of these names, in any case of its letters.
UserReader as_one_of(std::string& into, std::vector<std::string_view> names);
// Reads a dtype, its name or a precision; null is none.
UserReader as_dtype(std::optional<FloatType>& into);
// Reads a dictionary whose keys have a table of their own; `into` stays null without one.
UserReader as_section(const UserValue*& into);
// Reads this value alone, or a text of it: another one would change a result, and is an error for that reason.
UserReader as_only(Scalar expected, std::string_view why);
// Reads what says no: all else is an error, for that reason.
UserReader as_absent(std::string_view why);
// Reads a value that changes no result, whatever it is; with a reader what that takes.
UserReader as_ignored(UserReader reader = {});

bool is_number_in(double value, double least, double most, bool whole);
std::string expected_number(double least, double most, bool whole);

template <class T>
UserReader as_number(T& into, double least, double most) {
  using Number = typename decltype(std::optional(into))::value_type;
  constexpr bool is_whole = std::is_integral_v<Number>;
  return [&into, least, most](const UserValue& given, Notation) -> Reading {
    const auto found = number_of(given);
    if (!found || !is_number_in(*found, least, most, is_whole)) {
      return refused(given, expected_number(least, most, is_whole));
    }
    into = static_cast<Number>(*found);
    return {};
  };
}

}  // namespace lamina::config
