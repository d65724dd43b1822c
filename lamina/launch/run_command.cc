// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/run_command.h"

#include <iostream>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/launch/launcher.h"
#include "lamina/launch/options/options.h"
#include "lamina/launch/ranks/error.h"
#include "lamina/launch/timeline_folder.h"

namespace lamina::launch {
namespace {

int complain(const std::exception& error, int code) {
  std::cerr << "lamina run: " << error.what() << '\n';
  return code;
}

// The file never costs a job its exit code.
int launch_recorded(Options options) {
  TimelineFolder folder(*options.timeline);
  options.variables.push_back(folder.variable());
  const int code = launch(options);
  try {
    const std::string summary = folder.finish();
    std::cerr << (summary.empty() ? "lamina run: no rank has recorded a step: there is no timeline\n" : summary);
  } catch (const base::Error& error) {
    complain(error, code);
  }
  return code;
}

}  // namespace

int run_command(const std::vector<std::string>& arguments) {
  Options options;
  if (auto code = parse_run(arguments, options)) return *code;
  try {
    return options.timeline ? launch_recorded(std::move(options)) : launch(options);
  } catch (const base::ConfigError& error) {
    return complain(error, 2);
  } catch (const StartError& error) {
    return complain(error, kCannotStart);
  }
}

}  // namespace lamina::launch
