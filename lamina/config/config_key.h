// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "lamina/config/config.h"
#include "lamina/config/scalar.h"

namespace lamina::config {

// How one key is read into a Config, written from it, and what it allows.
struct Key {
  std::string name;
  std::string allowed;                               // as in "expected an integer, at least 1"
  std::function<bool(Config&, const Scalar&)> read;  // false, and nothing changed: the value is not allowed
  std::function<Scalar(const Config&)> write;
};

}  // namespace lamina::config
