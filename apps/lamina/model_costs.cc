// SPDX-License-Identifier: Apache-2.0
#include "apps/lamina/model_costs.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "lamina/base/error.h"
#include "lamina/base/fd.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/launch/options/program.h"

extern char** environ;

namespace lamina::command {
namespace {

std::vector<std::string> command_of(const PlannedModel& model) {
  std::vector<std::string> words = {"--model=" + model.callable};
  for (const std::string& input : model.inputs) words.push_back("--input=" + input);
  if (model.times) words.push_back("--times");
  if (model.has_one_batch) words.push_back("--prescaled-batch");
  words.push_back(base::str("--partitions=", model.partitions));
  words.push_back(base::str("--tensor-parallel-degree=", model.degree));
  words.push_back("--optimize=" + model.optimize);
  return launch::own_script(launch::find_interpreter(), "from lamina.planning.cli import main; sys.exit(main())",
                            words);
}

pid_t start(std::vector<std::string> words, int output) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  pid_t process = 0;
  const int failed = posix_spawn(&process, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (failed != 0)
    throw base::ConfigError(base::str(words.front(), " cannot be started: ", base::system_error(failed)));
  return process;
}

std::string read_all(int input) {
  std::string text;
  char piece[65'536];
  for (;;) {
    const ssize_t count = ::read(input, piece, sizeof piece);
    if (count > 0) text.append(piece, count);
    if (count == 0 || (count < 0 && errno != EINTR)) return text;
  }
}

}  // namespace

std::optional<std::string> model_members(const PlannedModel& model) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw base::ConfigError(base::str("no pipe: ", base::system_error()));
  base::Fd input(ends[0]);
  base::Fd output(ends[1]);
  const pid_t process = start(command_of(model), output.get());
  output = base::Fd();
  std::string text = read_all(input.get());
  int status = 0;
  while (::waitpid(process, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return std::nullopt;
  return text;
}

}  // namespace lamina::command
