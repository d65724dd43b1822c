// SPDX-License-Identifier: Apache-2.0
#include "lamina/fused/declaration.h"

#include <algorithm>
#include <cmath>
#include <ranges>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::fused {
namespace {

using base::str;
using base::UsageError;

bool within(double value, const HyperField& field) {
  switch (field.bound) {
    case Bound::kAny:
      return true;
    case Bound::kNotNegative:
      return value >= 0;
    case Bound::kFraction:
      return value >= 0 && value < 1;
    case Bound::kUpToOne:
      return value >= 0 && value <= 1;
    case Bound::kBetween:
      return value > 0 && value < 1;
    case Bound::kAboveOne:
      return value > 1;
    case Bound::kFlag:
      return value == 0 || value == 1;
    case Bound::kChoice:
      return value >= 0 && value <= static_cast<double>(std::ranges::count(std::string_view(field.choices), ' ')) &&
             value == std::floor(value);
  }
  return false;
}

}  // namespace

double hyper_value(const HyperField& field, const HyperValue& value) {
  if (value.word.empty()) return value.number;
  double index = 0;
  for (const auto choice : std::views::split(std::string_view(field.choices), ' ')) {
    if (std::string_view(choice.begin(), choice.end()) == value.word) return index;
    ++index;
  }
  throw UsageError(str("Invalid ", *field.label != '\0' ? field.label : field.name, ": ", value.word));
}

std::string hyper_word(const HyperField& field, double value) {
  auto words = std::views::split(std::string_view(field.choices), ' ');
  const auto word = *std::next(words.begin(), static_cast<std::ptrdiff_t>(value));
  return {word.begin(), word.end()};
}

std::size_t hyper_index(const Declaration& declaration, std::string_view name) {
  return static_cast<std::size_t>(std::ranges::find(declaration.hyper, name, &HyperField::name) -
                                  declaration.hyper.begin());
}

std::vector<double> hyper_values(const Declaration& declaration,
                                 std::span<const std::pair<std::string_view, HyperValue>> given) {
  std::vector<double> values;
  for (const HyperField& field : declaration.hyper) values.push_back(field.preset);
  for (const auto& [name, value] : given) {
    const std::size_t index = hyper_index(declaration, name);
    if (index == values.size()) throw UsageError(str(declaration.name, " has no hyper-parameter ", name));
    values[index] = hyper_value(declaration.hyper[index], value);
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i]) && std::isnan(declaration.hyper[i].preset)) {
      throw UsageError(str(declaration.name, " needs a value of ", declaration.hyper[i].name));
    }
  }
  return values;
}

void check_hyper(const Declaration& declaration, Hyper hyper) {
  if (hyper.size() != declaration.hyper.size()) {
    throw UsageError(
        str(declaration.name, " has ", declaration.hyper.size(), " hyper-parameters, and was given ", hyper.size()));
  }
  for (std::size_t i = 0; i < hyper.size(); ++i) {
    const HyperField& field = declaration.hyper[i];
    if (within(hyper[i], field)) continue;
    throw UsageError(str("Invalid ", *field.label != '\0' ? field.label : field.name, ": ", hyper[i]));
  }
}

}  // namespace lamina::fused
