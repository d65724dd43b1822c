// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/launch/options/environment.h"

namespace lamina::launch {

// `word` with a leading `~` or `~user` replaced by that home folder, then every $NAME and ${NAME} by its value in
// `environment`. What is not known there stays as it is written, and so does what is known behind a backslash, which
// goes.
std::string expand(const std::string& word, const Variables& environment);

}  // namespace lamina::launch
