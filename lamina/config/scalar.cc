// SPDX-License-Identifier: Apache-2.0
#include "lamina/config/scalar.h"

#include <nlohmann/json.hpp>

namespace lamina::config {
namespace {

// Not strict: a message about a string that is not UTF-8 must still be written.
std::string dump(const nlohmann::json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

struct Show {
  std::string operator()(std::monostate) const { return "null"; }
  std::string operator()(const Unreadable& value) const { return value.text; }
  template <class T>
  std::string operator()(const T& value) const {
    return dump(nlohmann::json(value));
  }
};

}  // namespace

std::string show(const Scalar& value) { return std::visit(Show{}, value); }

}  // namespace lamina::config
