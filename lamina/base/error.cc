// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/error.h"

#include "lamina/base/coded.h"

namespace lamina::base {

std::string Error::named(const std::string& text, Code code) { return coded(text, code.name); }

}  // namespace lamina::base
