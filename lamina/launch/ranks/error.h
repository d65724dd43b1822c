// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/base/error.h"

namespace lamina::launch {

// A rank could not be started, though what was asked for is sound.
class StartError : public base::Error {
 public:
  using Error::Error;
};

// A job's exit code then, as of a shell.
constexpr int kCannotStart = 127;

}  // namespace lamina::launch
