// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/program.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "lamina/base/error.h"
#include "lamina/base/own_code.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::launch {
namespace {

namespace fs = std::filesystem;

bool executable(const std::string& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// "python", "python3.12", or a path of such a file.
bool names_python(const fs::path& word) {
  const std::string name = word.filename();
  return name.starts_with("python") && name.find_first_not_of("0123456789.", 6) == std::string::npos;
}

// A folder is a script too: Python runs its __main__.py.
void require_script(const std::string& path) {
  if (::access(path.c_str(), R_OK) == 0) return;
  throw base::ConfigError(base::str("cannot read script ", path, ": ", base::system_error(),
                                    " (check the path, or use -m for a module, -c for a program)"));
}

}  // namespace

std::optional<std::string> find_executable(const std::string& name) {
  if (name.find('/') != std::string::npos) return executable(name) ? std::optional(name) : std::nullopt;
  std::istringstream folders(variable("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    std::string path = base::str(folder.empty() ? "." : folder, "/", name);
    if (executable(path)) return path;
  }
  return std::nullopt;
}

std::string find_interpreter() {
  if (const std::string wanted = variable("LAMINA_PYTHON"); !wanted.empty()) {
    const auto path = find_executable(wanted);
    if (!path)
      throw base::ConfigError(base::str("LAMINA_PYTHON is ", wanted, ", which is no executable: correct or unset it"));
    base::require_own_code(*path, "LAMINA_PYTHON", base::Writers::kAnybody);
    return *path;
  }
  std::error_code ignored;
  std::string beside = fs::read_symlink("/proc/self/exe", ignored).replace_filename("python");
  if (executable(beside)) return beside;
  if (auto path = find_executable("python3")) return *path;
  throw base::ConfigError("no Python found: set LAMINA_PYTHON, or put python3 in PATH");
}

std::vector<std::string> own_script(const std::string& interpreter, const std::string& text,
                                    const std::vector<std::string>& words) {
  std::vector<std::string> all{interpreter, "-c", "import sys; sys.path[:] = filter(None, sys.path)\n" + text};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

void leave_out_python(Options& options) {
  auto& words = options.target;
  if (options.module || options.command || words.size() < 2 || !names_python(words.front())) return;
  const fs::path named = words.front();
  std::error_code ignored;
  if (named.has_parent_path()) {
    options.command = executable(named);
  } else if (fs::is_regular_file(named, ignored) || fs::is_regular_file(named / "__main__.py", ignored)) {
    return;  // a script of that name
  } else if (words[1] == "-m" && words.size() > 2) {
    options.module = true;
    words.erase(words.begin(), words.begin() + 2);
  } else if (words[1].starts_with('-')) {
    options.command = true;
  } else {
    words.erase(words.begin());
  }
}

Program find_program(const Options& options) {
  const std::string& target = options.target.front();
  Program program{.path = {}, .arguments = options.target};
  if (options.command) {
    auto path = find_executable(target);
    if (!path) throw base::ConfigError(base::str("cannot find program ", target, ": check its name, PATH and mode"));
    program.path = *path;
    return program;
  }
  if (!options.module) require_script(target);
  program.path = find_interpreter();
  auto& words = program.arguments;
  if (options.module) words.insert(words.begin(), "-m");
  words.insert(words.begin(), program.path);
  program.own_words = options.module ? 3 : 2;
  return program;
}

Program Program::for_rank(const Variables& environment) const {
  Program program = *this;
  for (std::size_t i = own_words; i < program.arguments.size(); ++i) {
    program.arguments[i] = expand(program.arguments[i], environment);
  }
  return program;
}

}  // namespace lamina::launch
