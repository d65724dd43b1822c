// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/command_line.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <iostream>

namespace lamina::launch {
namespace {

bool takes_value(const CLI::App& app, const std::string& name) {
  const CLI::Option* option = app.get_option_no_throw(name);
  return option != nullptr && option->get_items_expected_min() > 0;
}

// Whether the value of an option of `word` is the word after it: `--nproc 2`, `-n 2`, `-mn 2`, but not `-n2`.
bool wants_next_word(const CLI::App& app, const std::string& word) {
  if (word.starts_with("--")) return word.find('=') == std::string::npos && takes_value(app, word);
  for (std::size_t i = 1; i < word.size(); ++i) {
    if (takes_value(app, std::string("-") + word[i])) return i + 1 == word.size();
  }
  return false;
}

}  // namespace

CommandLine split(const CLI::App& app, const Arguments& arguments) {
  CommandLine line;
  auto word = arguments.begin();
  while (word != arguments.end() && word->size() > 1 && word->front() == '-') {
    if (*word == "--") {
      ++word;
      break;
    }
    const bool with_value = wants_next_word(app, *word);
    line.options.push_back(*word++);
    if (with_value && word != arguments.end()) line.options.push_back(*word++);
  }
  line.rest.assign(word, arguments.end());
  return line;
}

std::optional<int> parse(CLI::App& app, const std::string& name, const Arguments& options) {
  try {
    app.parse(Arguments(options.rbegin(), options.rend()));  // CLI11 takes the words from the back
    return std::nullopt;
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    std::cerr << name << ": " << error.what() << "; see `" << name << " --help`\n";
    return 2;
  }
}

std::optional<int> parse_run(const Arguments& arguments, Options& options) {
  CLI::App app("Starts the ranks of a job on this machine, watches them, and ends all of them when one fails.",
               "lamina run");
  app.add_option("SCRIPT", options.target, "what to run; all words after it go to it untouched")
      ->type_name("ARGUMENTS");
  app.add_option("-n,--nproc", options.processes, "ranks to start (1 if not given)")
      ->check(CLI::TypeValidator<int>("whole number"))
      ->type_name("N");
  app.add_flag("-m,--module_mode", options.module, "SCRIPT is a Python module");
  app.add_flag("-c,--command_mode", options.command, "SCRIPT is a program, started without Python");
  app.footer(
      "Python is $LAMINA_PYTHON, else `python` beside this program, else `python3`.\n"
      "Local rank 0 writes to this terminal; of the others, the one that fails first has its last lines shown.\n"
      "Rank 0 reads this program's standard input, except from a terminal; the other ranks read nothing.\n"
      "The exit code is that of the rank that failed first, 128 + n after signal n; 2 for wrong arguments.");
  CommandLine line = split(app, arguments);
  if (auto code = parse(app, "lamina run", line.options)) return code;
  options.target = std::move(line.rest);
  return std::nullopt;
}

}  // namespace lamina::launch
