// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::launch {

void Options::validate() const {
  std::string wrong;
  auto note = [&](const std::string& problem) { wrong += (wrong.empty() ? "" : "; ") + problem; };
  if (processes < 1) note(base::str("-n must be 1 or greater, not ", processes));
  if (module && command) note("-m (a Python module) and -c (a program) exclude each other: give one of them");
  if (target.empty() || target.front().empty()) note("say what to run, as in `lamina run -n 2 train.py`");
  if (!wrong.empty()) throw base::ConfigError(wrong);
}

}  // namespace lamina::launch
