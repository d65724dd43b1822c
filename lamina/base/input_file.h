// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <limits>
#include <string>

#include "lamina/base/fd.h"

// Files that a user names to be read. What is none, or never ends, is an error instead of a wait: a folder, a device, a
// pipe that nobody opens within 2 s, or writes into for 60 s. So is a file that is larger than makes sense. All throw
// ConfigError; `before` are its first words.
namespace lamina::base {

Fd open_input(const std::string& path, const std::string& before);

// Returns what is left of it, or the next `most` bytes.
std::string read_input(const Fd& file, const std::string& before,
                       std::size_t most = std::numeric_limits<std::size_t>::max());

// Returns all of it, which has `most` bytes at most.
std::string read_file(const std::string& path, const std::string& before, std::size_t most);

// The most bytes that a file of this kind may have: of a dictionary of keys, of rows for modules, of a job's events.
constexpr std::size_t kMostOfKeys = std::size_t{1} << 20, kMostOfRows = std::size_t{64} << 20,
                      kMostOfEvents = std::size_t{4} << 30;

}  // namespace lamina::base
