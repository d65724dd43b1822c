// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/command_line.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <iostream>

#include "lamina/base/printable.h"

namespace lamina::launch {
namespace {

bool takes_value(const CLI::App& app, const std::string& name) {
  const CLI::Option* option = app.get_option_no_throw(name);
  return option != nullptr && option->get_items_expected_min() > 0;
}

// Says if the value of an option of `word` is the word after it: `--nproc 2`, `-n 2`, `-mn 2`, but not `-n2`.
bool wants_next_word(const CLI::App& app, const std::string& word) {
  if (word.starts_with("--")) return word.find('=') == std::string::npos && takes_value(app, word);
  for (std::size_t i = 1; i < word.size(); ++i) {
    if (takes_value(app, std::string("-") + word[i])) return i + 1 == word.size();
  }
  return false;
}

// The long option that `word` abbreviates, `=value` kept; the word itself unless exactly one option begins with it.
std::string in_full(const CLI::App& app, const std::string& word) {
  const std::string name = word.substr(0, word.find('='));
  if (name.size() < 3 || !name.starts_with("--")) return word;
  const CLI::Option* found = nullptr;
  std::string full;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& known : option->get_lnames()) {
      if ("--" + known == name) return word;
      if (!("--" + known).starts_with(name)) continue;
      if (found != nullptr && found != option) return word;
      found = option;
      full = "--" + known;
    }
  }
  return found == nullptr ? word : full + word.substr(name.size());
}

}  // namespace

CommandLine split(const CLI::App& app, const Arguments& given) {
  Arguments arguments = given;
  CommandLine line;
  auto word = arguments.begin();
  while (word != arguments.end() && word->size() > 1 && word->front() == '-') {
    if (*word == "--") {
      ++word;
      break;
    }
    *word = in_full(app, *word);
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
    std::cerr << name << ": " << base::printable_line(error.what()) << "; see `" << name << " --help`\n";
    return 2;
  }
}

}  // namespace lamina::launch
