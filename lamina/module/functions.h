// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "lamina/module/modules.h"

namespace lamina::module {

// C++ functions as modules. A function calls others by number through its job; arguments and results are whatever
// trees the functions agree on.
class Functions : public Modules {
 public:
  using Function = std::function<value::Value(value::Value)>;

  base::ModuleId add(std::string name, Function function) {
    functions_.emplace_back(std::move(name), std::move(function));
    return base::ModuleId(static_cast<std::int64_t>(functions_.size()) - 1);
  }

  std::string name(base::ModuleId id) const override { return functions_.at(id.value).first; }
  std::string capture_state(base::ModuleId) override { return ""; }
  value::Value call(base::ModuleId id, const std::string&, value::Value arguments) override {
    return functions_.at(id.value).second(std::move(arguments));
  }

 private:
  std::vector<std::pair<std::string, Function>> functions_;
};

}  // namespace lamina::module
