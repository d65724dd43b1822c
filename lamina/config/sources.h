// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lamina/config/config.h"

namespace lamina::config {

// Variables of the environment that hold a configuration.
inline constexpr const char* kOwnVariable = "LAMINA_CONFIG";
inline constexpr const char* kSageMakerVariable = "SM_HP_MP_PARAMETERS";

// Places that may say the configuration. The first of kOwnVariable, kSageMakerVariable and `json` that says anything
// counts alone: keys of two are never mixed.
struct Sources {
  ConfigInput input;                           // its `environment` is kSageMakerVariable
  std::optional<std::string> own_environment;  // kOwnVariable
};

struct GivenConfig : ParsedConfig {
  std::vector<std::string> given;  // the keys that the source says which counts
};

// As parse_config(). What a source says that does not count has a warning, with the name of the one that counts and
// each value for which that one has another.
GivenConfig parse_sources(const Sources& sources);

}  // namespace lamina::config
