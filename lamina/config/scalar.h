// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace lamina::config {

// A JSON value that no key takes (an object, an integer beyond 64 bits), kept as its text for messages.
struct Unreadable {
  std::string text;
  friend bool operator==(const Unreadable&, const Unreadable&) = default;
};

// The value of one key of a configuration; monostate is null, and a list one of texts.
using Scalar =
    std::variant<std::monostate, bool, std::int64_t, double, std::string, std::vector<std::string>, Unreadable>;

// The value as JSON, shortest form that reads back the same: 4, 4.0, "4", true, null.
std::string show(const Scalar& value);

}  // namespace lamina::config
