// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::launch {

// What `lamina run` is asked to do.
struct Options {
  int processes = 1;                // ranks to start on this machine
  bool module = false;              // target[0] is a Python module (-m)
  bool command = false;             // target[0] is a program that needs no interpreter (-c)
  std::vector<std::string> target;  // what to run, then its arguments, untouched

  // Throws ConfigError: one line that names every wrong field. Looks at no file.
  void validate() const;
};

}  // namespace lamina::launch
