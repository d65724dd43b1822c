// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/base/error.h"

namespace lamina::launch {

// A rank could not be started, though what was asked for is sound.
class StartError : public base::Error {
 public:
  using Error::Error;
};

}  // namespace lamina::launch
