// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/model/plan.h"
#include "lamina/value/value.h"

namespace lamina::frontend {

// Costs of modules of these names, as the first rank has found them.
struct Trace {
  std::vector<std::string> modules;
  model::Costs costs;

  // As it goes to other ranks.
  value::Value as_value() const;
  static Trace read(const value::Value& value);
};

}  // namespace lamina::frontend
