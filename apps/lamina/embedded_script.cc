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
    auto all = launch::own_script(python, script, words);
    std::vector<char*> pointers;
    for (std::string& word : all) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    std::cout.flush();
    ::execv(python.c_str(), pointers.data());
    complain(name, ": cannot start ", python, ": ", base::system_error());
  } catch (const base::Error& error) {
    complain(name, ": ", error.what());
  }
  return 2;
}

}  // namespace lamina::command
