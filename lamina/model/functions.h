// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "lamina/model/modules.h"

namespace lamina::model {

// C++ functions as modules. A function calls others by number through its job; arguments and results are whatever
// trees the functions agree on.
class Functions : public Modules {
 public:
  using Function = std::function<value::Value(value::Value)>;

  base::ModuleId add(std::string name, Function function, bool starts_rng_stream = false) {
    functions_.emplace_back(std::move(name), std::move(function), starts_rng_stream);
    return base::ModuleId(static_cast<std::int64_t>(functions_.size()) - 1);
  }

  std::string name(base::ModuleId id) const override { return functions_.at(id.value).name; }
  CallerState capture_state(base::ModuleId) override { return {}; }
  bool starts_rng_stream(base::ModuleId id) const override { return functions_.at(id.value).starts_rng_stream; }
  value::Value call(base::ModuleId id, const std::string&, value::Value arguments) override {
    return functions_.at(id.value).function(std::move(arguments));
  }

 private:
  struct NamedValue {
    std::string name;
    Function function;
    bool starts_rng_stream;
  };
  std::vector<NamedValue> functions_;
};

}  // namespace lamina::model
