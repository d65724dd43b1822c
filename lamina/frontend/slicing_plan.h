// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "lamina/tensor_parallel/known_styles.h"

namespace torch::nn {
class Module;
}

namespace lamina {

// Styles of layers, by their names below a module, in which "*" stands for a part: see set_tensor_parallelism().
using SlicingPlan = tensor_parallel::Styles;

// The number of heads that modules have: a number, or the name under which numbers() has it. 0: as numbers() says.
using HeadCount = std::variant<std::int64_t, std::string>;

// A module that computes with heads. Its numbers become this rank's where layers in it are cut by columns.
class WithHeads {
 public:
  virtual ~WithHeads() = default;
  // Numbers of heads, and sizes, by the names that transformers has for them in Python: "num_heads",
  // "num_key_value_heads", "num_key_value_groups", "head_dim", "inner_dim", ...
  virtual std::map<std::string, std::int64_t*> numbers() = 0;
};

// Has layers below a module cut over the ranks of a TP_GROUP when its model is wrapped, as Python's function of this
// name does:
//
//     lamina::set_tensor_parallelism(*net, {{"layers.*.up", "colwise"}, {"layers.*.down", "rowwise"}});
//
// Layers are torch's Linear and Embedding. A plan inside of the module, given before, counts no longer. Throws
// base::UsageError for `heads` that are neither a number nor a name; what does not fit the model is an error when that
// is wrapped.
void set_tensor_parallelism(const torch::nn::Module& module, SlicingPlan plan, const HeadCount& heads = {});

namespace frontend {

// A plan that a module was given.
struct GivenPlan {
  SlicingPlan styles;
  std::optional<tensor_parallel::SaidHeads> heads;
};
std::optional<GivenPlan> plan_of(const torch::nn::Module& module);

}  // namespace frontend
}  // namespace lamina
