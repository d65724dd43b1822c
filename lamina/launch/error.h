// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

#include "lamina/base/error.h"

namespace lamina::launch {

// A rank could not be started, though what was asked for is sound.
class StartError : public base::Error {
 public:
  using Error::Error;
};

// The system's words for an errno.
inline std::string system_words(int code = errno) { return std::generic_category().message(code); }

}  // namespace lamina::launch
