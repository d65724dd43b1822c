// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/error.h"

#include <algorithm>

#include "lamina/base/printable.h"

namespace lamina::base {

std::string Error::named(const std::string& text, Code code) {
  auto shown = printable(text);
  if (*code.name != '\0') shown.insert(std::min(shown.find('\n'), shown.size()), std::string(" [") + code.name + "]");
  return shown;
}

}  // namespace lamina::base
