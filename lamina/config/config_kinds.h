// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lamina/base/str.h"
#include "lamina/config/config_key.h"

// The kinds of keys: each function makes the Key of one field of Config. A field that is optional<> takes null too.
namespace lamina::config {

template <class T>
struct Plain {
  using type = T;
};
template <class T>
struct Plain<std::optional<T>> {
  using type = T;
};

// A key whose JSON type is J. `convert` turns a J into the field's type, or into nothing when it is not allowed;
// `revert` is its inverse.
template <class J, class Field, class Convert, class Revert>
Key key_of(std::string name, std::string allowed, Field Config::* field, Convert convert, Revert revert) {
  constexpr bool optional = !std::is_same_v<Field, typename Plain<Field>::type>;
  const auto read = [=](Config& config, const Scalar& value) {
    if constexpr (optional) {
      if (std::holds_alternative<std::monostate>(value)) {
        config.*field = std::nullopt;
        return true;
      }
    }
    const J* given = std::get_if<J>(&value);
    const auto converted = given ? convert(*given) : std::nullopt;
    if (converted) config.*field = *converted;
    return converted.has_value();
  };
  const auto write = [=](const Config& config) -> Scalar {
    if constexpr (optional) {
      return config.*field ? Scalar(J(revert(*(config.*field)))) : Scalar();
    } else {
      return J(revert(config.*field));
    }
  };
  return {std::move(name), std::move(allowed), read, write};
}

// Strict: neither true nor 4.0 is an integer.
template <class Field>
Key integer(std::string name, Field Config::* field, std::int64_t low,
            std::int64_t high = std::numeric_limits<typename Plain<Field>::type>::max()) {
  using T = typename Plain<Field>::type;
  const std::string allowed = high == std::numeric_limits<T>::max() ? base::str("an integer, at least ", low)
                                                                    : base::str("an integer from ", low, " to ", high);
  const auto convert = [=](std::int64_t x) { return x >= low && x <= high ? std::optional<T>(x) : std::nullopt; };
  return key_of<std::int64_t>(std::move(name), allowed, field, convert, [](T x) { return x; });
}

// An integer is a number too. `holds` must be false for a NaN.
template <class Field>
Key number(std::string name, Field Config::* field, std::string allowed, bool (*holds)(double)) {
  const auto convert = [=](double x) { return holds(x) ? std::optional(x) : std::nullopt; };
  Key key = key_of<double>(std::move(name), std::move(allowed), field, convert, [](double x) { return x; });
  key.read = [strict = key.read](Config& config, const Scalar& value) {
    const auto* whole = std::get_if<std::int64_t>(&value);
    return strict(config, whole ? Scalar(static_cast<double>(*whole)) : value);
  };
  return key;
}

// One of `names`, in the order of the enumeration's values.
template <class Field>
Key choice(std::string name, Field Config::* field, std::vector<std::string> names) {
  using E = typename Plain<Field>::type;
  std::string allowed = "one of";
  for (const std::string& each : names) allowed += base::str(&each == names.data() ? " " : ", ", show(each));
  const auto convert = [names](const std::string& x) {
    const auto at = std::find(names.begin(), names.end(), x);
    return at == names.end() ? std::nullopt : std::optional(static_cast<E>(at - names.begin()));
  };
  const auto revert = [names](E x) { return names.at(static_cast<std::size_t>(x)); };
  return key_of<std::string>(std::move(name), allowed, field, convert, revert);
}

Key flag(std::string name, bool Config::* field);
Key text(std::string name, std::optional<std::string> Config::* field);
Key placement(std::string name, std::string Config::* field);

}  // namespace lamina::config
