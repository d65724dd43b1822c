// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/launch/options/layout.h"
#include "lamina/launch/options/options.h"
#include "lamina/launch/options/program.h"
#include "lamina/launch/options/variables.h"

namespace lamina::launch {

// The knowledge of a job before anything of it is started.
struct Preparation {
  Options options;
  Layout layout;
  Program program;
  Variables inherited;                // by all ranks
  std::vector<std::string> warnings;  // a line each
};

// Reads the files that the options name, the environment and the devices. Throws ConfigError, one line that says what
// to change.
Preparation prepare(const Options& options);

}  // namespace lamina::launch
