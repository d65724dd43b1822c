// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lamina/launch/options/options.h"
#include "lamina/launch/options/variables.h"

namespace lamina::launch {

// The program that every rank executes.
struct Program {
  std::string path;                    // the file given to exec
  std::vector<std::string> arguments;  // arguments[0] is the program's own name
  std::size_t own_words = 1;           // of the arguments: what comes after them was given to the script

  // Returns the program with `~` and $NAME in the script's arguments expanded, see expand().
  Program for_rank(const Variables& environment) const;
};

// The executable that a shell would start for `name`: itself if it has a slash, else the first one in PATH.
std::optional<std::string> find_executable(const std::string& name);

// $LAMINA_PYTHON, else `python` beside this executable, else `python3` in PATH. Throws ConfigError, also where others
// may write to what LAMINA_PYTHON names.
std::string find_interpreter();

// The words that have an interpreter run a text that is no program of the user. It would look for the text's imports in
// the current folder first, which may be anybody's. `-P`, by which it does not, came with Python 3.11 only.
std::vector<std::string> own_script(const std::string& interpreter, const std::string& text,
                                    const std::vector<std::string>& words);

// Takes the interpreter out of `lamina run python train.py`: it is started here anyway. A path of one, or options for
// it, make the target a program that is started as it is (-c).
void leave_out_python(Options& options);

// Turns valid options into the program to start. Throws ConfigError when a file it needs is not there, so that this
// is known before anything has been started.
Program find_program(const Options& options);

}  // namespace lamina::launch
