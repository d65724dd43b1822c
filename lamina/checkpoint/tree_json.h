// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lamina/value/value.h"

namespace lamina::checkpoint {

// A value tree as JSON, in which nothing can be executed. A value that JSON lacks is an object with one key, its type:
// {"tuple": [...]}, {"float": "nan"}, {"tensor": 3}. Tensors are put behind `tensors`, and stand there by their place.
// Throws base::UsageError for an object of another class, unless `allow_objects`.
nlohmann::json to_json(const value::Value& tree, std::vector<at::Tensor>& tensors, bool allow_objects);

// The way back; `tensor` gives the tensor of a place. Throws base::FormatError for what to_json() does not write, and
// base::UsageError for an object of another class, unless `allow_objects`.
value::Value to_value(const nlohmann::json& json, const std::function<at::Tensor(std::size_t)>& tensor,
                      bool allow_objects);

}  // namespace lamina::checkpoint
