// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/trace_command.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <iostream>

#include "lamina/base/error.h"
#include "lamina/launch/command_line.h"
#include "lamina/observe/summary.h"
#include "lamina/observe/timeline_part.h"

namespace lamina::command {

int trace(const std::vector<std::string>& arguments) {
  CLI::App app("Says what the ranks of a job spent their time on, from its timeline.", "lamina trace");
  std::string path;
  app.add_option("FILE", path, "what `lamina run --timeline FILE` or lamina.timeline(FILE) wrote")
      ->required()
      ->type_name("");
  if (auto code = launch::parse(app, "lamina trace", arguments)) return *code;
  try {
    std::cout << observe::describe(observe::summarise(observe::read_file(path)));
    return 0;
  } catch (const base::Error& error) {
    std::cerr << "lamina trace: " << path << ": " << error.what() << '\n';
    return 2;
  }
}

}  // namespace lamina::command
