// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/user_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>

#include "lamina/base/joined.h"
#include "lamina/base/str.h"

namespace lamina::config {
namespace {

constexpr double kAlike = 0.6;  // a nearest name that is less alike is no help

const UserReader* find_reader(const UserTable& table, std::string_view key) {
  for (const auto& row : table) {
    if (std::ranges::count(row.keys, key) > 0) return &row.read;
  }
  return nullptr;
}

// The number that a text is, with blanks around it or not.
std::optional<double> parsed_number(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const auto begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return std::nullopt;
  text = text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
  if (text.starts_with('+') && !text.starts_with("+-")) text.remove_prefix(1);
  double found = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
  return error == std::errc() && end == text.data() + text.size() ? std::optional(found) : std::nullopt;
}

const std::map<std::string_view, FloatType>& names_of_dtypes() {
  using enum FloatType;
  static const std::map<std::string_view, FloatType> names{
      {"fp32", kFp32},           {"float32", kFp32}, {"torch.float32", kFp32}, {"fp16", kFp16},
      {"float16", kFp16},        {"half", kFp16},    {"torch.float16", kFp16}, {"amp", kFp16},
      {"amp_fp16", kFp16},       {"bf16", kBf16},    {"bfloat16", kBf16},      {"bfloat", kBf16},
      {"torch.bfloat16", kBf16}, {"amp_bf16", kBf16}};
  return names;
}

}  // namespace

void read_table(const std::string& where, const UserValue& given, const UserTable& table, Findings& findings) {
  if (!given.entries) {
    findings.problems.add(where, not_allowed(where, given.shown, "a dictionary"));
    return;
  }
  for (const auto& [key, shown, value] : *given.entries) {
    const auto name = base::str(where, "[", shown, "]");
    const auto* reader = find_reader(table, key);
    if (reader == nullptr) {
      const auto nearest = nearest_of(key, keys_of(table), kAlike);
      findings.problems.add(name, base::str(name, ": no key is called so; ",
                                            nearest.empty() ? base::str("there are ", base::joined(keys_of(table)))
                                                            : base::str("the nearest is ", nearest)));
      continue;
    }
    const auto [problem, has_effect] = (*reader)(value, findings.notation);
    if (!problem.empty()) {
      findings.problems.add(name, base::str(name, ": ", problem));
    } else if (!has_effect) {
      findings.without_effect.push_back(name);
    }
  }
}

std::vector<std::string_view> keys_of(const UserTable& table) {
  std::vector<std::string_view> keys;
  for (const auto& row : table) keys.insert(keys.end(), row.keys.begin(), row.keys.end());
  return keys;
}

Reading refused(const UserValue& given, std::string_view expected) {
  return {base::str(given.shown, " is not allowed; expected ", expected)};
}

std::optional<double> number_of(const UserValue& given) {
  if (const auto* whole = std::get_if<std::int64_t>(&given.value)) return static_cast<double>(*whole);
  if (const auto* number = std::get_if<double>(&given.value)) return *number;
  const auto* text = std::get_if<std::string>(&given.value);
  return text == nullptr ? std::nullopt : parsed_number(*text);
}

bool is_number_in(double value, double least, double most, bool whole) {
  if (!std::isfinite(value) || value < least || value > most) return false;
  return !whole || (std::trunc(value) == value && value < 0x1p63);
}

std::string expected_number(double least, double most, bool whole) {
  const auto end = std::isinf(most) ? std::string(" or more") : base::str(" to ", most);
  return base::str(whole ? "a whole number, " : "a number, ", least, end);
}

UserReader as_flag(bool& into) {
  return [&into](const UserValue& given, Notation notation) -> Reading {
    const auto word = word_of(given);
    const bool is_one = std::holds_alternative<bool>(given.value) || std::holds_alternative<std::string>(given.value);
    if (!is_one || (word != "true" && word != "false")) {
      return refused(given, base::str(show(true, notation), " or ", show(false, notation)));
    }
    into = word == "true";
    return {};
  };
}

UserReader as_one_of(std::string& into, std::vector<std::string_view> names) {
  return [&into, names = std::move(names)](const UserValue& given, Notation) -> Reading {
    const bool is_text = std::holds_alternative<std::string>(given.value);
    const auto word = word_of(given);
    const auto found = std::ranges::find(names, word, lower);
    if (!is_text || found == names.end()) {
      return refused(given, base::str("one of ", base::joined(names), "; the nearest is ", nearest_of(word, names)));
    }
    into = *found;
    return {};
  };
}

UserReader as_dtype(std::optional<FloatType>& into) {
  return [&into](const UserValue& given, Notation) -> Reading {
    if (std::holds_alternative<std::monostate>(given.value)) {
      into = std::nullopt;
      return {};
    }
    const auto word = word_of(given);
    const auto found = names_of_dtypes().find(word);
    if (!std::holds_alternative<std::string>(given.value) || found == names_of_dtypes().end()) {
      const auto nearest = nearest_of(word, {"fp32", "fp16", "bf16"});
      return refused(given, base::str("fp32, fp16 or bf16; the nearest is ", nearest));
    }
    into = found->second;
    return {};
  };
}

UserReader as_section(const UserValue*& into) {
  return [&into](const UserValue& given, Notation) -> Reading {
    if (!given.entries) return refused(given, "a dictionary");
    into = &given;
    return {};
  };
}

UserReader as_only(Scalar expected, std::string_view why) {
  return [expected = std::move(expected), why](const UserValue& given, Notation notation) -> Reading {
    if (std::holds_alternative<std::monostate>(given.value)) return {};
    const auto word = word_of(given), wanted = word_of({expected, ""});
    const bool is_whole = wanted.ends_with(".0") && word == wanted.substr(0, wanted.size() - 2);
    if (word == wanted || is_whole) return {};
    return {base::str(given.shown, ": ", why, "; expected ", show(expected, notation))};
  };
}

UserReader as_absent(std::string_view why) {
  return [why](const UserValue& given, Notation) -> Reading {
    const auto* said = &given;
    for (const auto* key : {"enabled", "device"}) {
      if (const auto* found = given.find(key)) said = found;
    }
    const auto word = word_of(*said);
    return {word == "none" || word == "false" ? "" : base::str(given.shown, ": ", why)};
  };
}

UserReader as_ignored(UserReader reader) {
  return [reader = std::move(reader)](const UserValue& given, Notation notation) -> Reading {
    return {reader ? reader(given, notation).problem : "", /*has_effect=*/false};
  };
}

}  // namespace lamina::config
