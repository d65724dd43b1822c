// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include "apps/lamina/checkpoint_command.h"
#include "apps/lamina/doctor_command.h"
#include "apps/lamina/explain_command.h"
#include "apps/lamina/plan_command.h"
#include "apps/lamina/say.h"
#include "apps/lamina/trace_command.h"
#include "apps/lamina/verify_command.h"
#include "lamina/base/edit_distance.h"
#include "lamina/launch/launcher.h"
#include "lamina/launch/options/command_line.h"

namespace {

struct Command {
  const char* name;
  const char* description;
  int (*run)(const std::vector<std::string>& arguments);
};

constexpr Command kCommands[] = {
    {"run", "Starts the ranks of a job, watches them, and ends all of them when one fails",
     lamina::launch::run_command},
    {"plan", "Says which rank would own which module of a model, and how long a step would take",
     lamina::command::plan},
    {"trace", "Says what the ranks of a job spent their time on, from its timeline", lamina::command::trace},
    {"verify", "Proves that a script trains in its layout as on one device, or says where it does not",
     lamina::command::verify},
    {"checkpoint", "Looks at the files of checkpoints, checks, compares, merges and removes them",
     lamina::command::checkpoint},
    {"doctor", "Says what this machine and its libraries are, and whether two ranks work here",
     lamina::command::doctor},
    {"explain", "Says when an error with this code comes, and what to do", lamina::command::explain},
};

// A descriptor opened later must not become a closed stdin, stdout or stderr.
void open_standard_streams() {
  int fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  while (fd >= 0 && fd <= 2) fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
}

int run(const std::vector<std::string>& words) {
  CLI::App app("Spreads a model and its training over many devices.", "lamina");
  app.set_version_flag("--version", "lamina " LAMINA_VERSION);
  for (const Command& command : kCommands) app.add_subcommand(command.name, command.description);
  const auto line = lamina::launch::split(app, words);
  if (auto code = lamina::launch::parse(app, "lamina", line.options)) return *code;
  const std::string name = line.rest.empty() ? "" : line.rest.front();
  for (const Command& command : kCommands) {
    if (name == command.name) return command.run({line.rest.begin() + 1, line.rest.end()});
  }
  if (name.empty()) return *lamina::launch::parse(app, "lamina", {"--help"});
  const Command& nearest = lamina::base::nearest(kCommands, name, &Command::name);
  lamina::command::complain("lamina: no command ", name, "; the nearest is ", nearest.name, ", see `lamina --help`");
  return 2;
}

}  // namespace

int main(int count, char** words) {
  open_standard_streams();
  try {
    return run({words + 1, words + count});
  } catch (const std::exception& error) {
    lamina::command::complain("lamina: ", error.what());
    return 1;
  }
}
