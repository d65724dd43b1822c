// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/embedded_script.h"

#include <unistd.h>

#include <iostream>

#include "apps/lamina/say.h"
#include "lamina/base/error.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/options/program.h"

namespace lamina::command {

int become_script(const std::string& name, const char* script, const std::vector<std::string>& words) {
  try {
    const std::string python = launch::find_interpreter();
    std::vector<const char*> all = {python.c_str(), "-c", script};
    for (const std::string& word : words) all.push_back(word.c_str());
    all.push_back(nullptr);
    std::cout.flush();
    ::execv(python.c_str(), const_cast<char* const*>(all.data()));
    complain(name, ": cannot start ", python, ": ", base::system_error());
  } catch (const base::Error& error) {
    complain(name, ": ", error.what());
  }
  return 2;
}

}  // namespace lamina::command
