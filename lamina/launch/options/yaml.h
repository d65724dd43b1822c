// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lamina::launch {

// A YAML document as JSON: plain scalars are null, booleans and numbers where YAML 1.2 reads them so. Throws
// ConfigError that begins with `source`.
nlohmann::json parse_yaml(const std::string& text, const std::string& source);

}  // namespace lamina::launch
