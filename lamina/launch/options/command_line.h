// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace CLI {  // NOLINT(readability-identifier-naming): the library's name
class App;
}

namespace lamina::launch {

using Arguments = std::vector<std::string>;

// A command line cut before its first positional word: the options of `app`, and the words that are not its business.
// A `--` between the two belongs to neither. Long options may be abbreviated; here they come in full.
struct CommandLine {
  Arguments options;
  Arguments rest;
};
CommandLine split(const CLI::App& app, const Arguments& given);

// Lets `app` read its own options. Returns an exit code when they end the program: 0 after help or version (printed
// on stdout), 2 after an error (one line on stderr that begins with `name`).
std::optional<int> parse(CLI::App& app, const std::string& name, const Arguments& options);

}  // namespace lamina::launch
