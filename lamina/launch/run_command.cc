// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/run_command.h"

#include <iostream>

#include "lamina/base/error.h"
#include "lamina/launch/error.h"
#include "lamina/launch/launcher.h"
#include "lamina/launch/run_options.h"

namespace lamina::launch {
namespace {

int complain(const std::exception& error, int code) {
  std::cerr << "lamina run: " << error.what() << '\n';
  return code;
}

}  // namespace

int run_command(const std::vector<std::string>& arguments) {
  Options options;
  if (auto code = parse_run(arguments, options)) return *code;
  try {
    return launch(options);
  } catch (const base::ConfigError& error) {
    return complain(error, 2);
  } catch (const StartError& error) {
    return complain(error, 127);
  }
}

}  // namespace lamina::launch
