// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "lamina/launch/options/command_line.h"
#include "lamina/launch/options/options.h"

namespace lamina::launch {

// Reads what follows `lamina run`, in the words of this launcher, of Composer's and of torchrun's. Returns an exit code
// as `parse` does, or nothing and fills `options`, not validated.
std::optional<int> parse_run(const Arguments& arguments, Options& options);

}  // namespace lamina::launch
