// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "lamina/base/error.h"
#include "lamina/config/config.h"

namespace lamina::config {

inline Config parsed(const std::string& json) { return parse_config({json, {}, true}).config; }

// The text of the ConfigError that `action` throws; fails the test when it throws none.
template <class Action>
std::string config_error(Action action) {
  try {
    action();
  } catch (const base::ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a ConfigError";
  return "";
}

inline std::string parse_error(const std::string& json) {
  return config_error([&] { parsed(json); });
}

}  // namespace lamina::config
