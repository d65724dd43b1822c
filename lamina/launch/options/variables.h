// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace lamina::launch {

using Variables = std::vector<std::string>;  // "NAME=value" each

// The environment of this process.
Variables own_environment();

// The value of that variable, or nothing.
std::optional<std::string> find(const Variables& variables, const std::string& name);

// Returns `word` with a leading `~` or `~user` replaced by that home folder, then every $NAME and ${NAME} by its value
// in `environment`. What is not known there stays as it is written, and so does what is known behind a backslash, which
// goes.
std::string expand(const std::string& word, const Variables& environment);

}  // namespace lamina::launch
