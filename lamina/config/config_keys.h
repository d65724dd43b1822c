// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/config/config.h"
#include "lamina/config/scalar.h"

namespace lamina::config {

// A key of the configuration: how it is read into a Config and written from it, and what it allows.
struct Key {
  std::string name;
  std::string allowed;                               // as in "expected an integer, at least 1"
  std::function<bool(Config&, const Scalar&)> read;  // false, and nothing changed: the value is not allowed
  std::function<Scalar(const Config&)> write;
};

// The table of keys.
const std::vector<Key>& config_keys();

// The one name by which a value is known here: "pipeline_parallel_degree" is "partitions". Other names come back as
// they are.
std::string_view canonical_name(std::string_view name);

// The key of that canonical name; null when there is none.
const Key* find_key(std::string_view name);

// Keys that existing scripts set although no documentation says what they do; they have no effect here.
bool is_tolerated(std::string_view name);

// The known name with the fewest typing errors between it and `name`; of equally near ones the first by alphabet.
std::string nearest_name(std::string_view name);

}  // namespace lamina::config
