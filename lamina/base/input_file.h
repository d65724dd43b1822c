// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <limits>
#include <string>

#include "lamina/base/fd.h"

// Files that a user names to be read. What is none, or never ends, is an error instead of a wait: a folder, a device, a
// pipe that nobody opens within 2 s, or writes into for 60 s. All throw ConfigError; `before` are its first words.
namespace lamina::base {

Fd open_input(const std::string& path, const std::string& before);

// Returns what is left of it, or the next `most` bytes.
std::string read_input(const Fd& file, const std::string& before,
                       std::size_t most = std::numeric_limits<std::size_t>::max());

inline std::string read_file(const std::string& path, const std::string& before) {
  return read_input(open_input(path, before), before);
}

}  // namespace lamina::base
