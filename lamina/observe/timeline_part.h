// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include "lamina/observe/event.h"

// Timelines on their way from the ranks to the file that holds them all.
namespace lamina::observe {

std::string encode(const Timeline& timeline);
// Throws base::FormatError.
Timeline decode(std::string_view bytes);

// Adds events of a rank to those that a file has, or makes it. Throws base::Error; the file is then as it was.
void append_to_part(const Timeline& piece, const std::string& path);
// Every event, but for what the rank was writing when it was killed. Throws base::Error when the file cannot be read,
// base::FormatError.
Timeline read_part(const std::string& path);

// Adds the ranks of another part of the same job.
void add(Timeline& timeline, Timeline part);

// Where ranks of one machine leave their parts: a folder, which this variable names to them.
constexpr const char* kPartsVariable = "LAMINA_TIMELINE_PARTS";
std::string part_in(const std::string& folder, std::int64_t rank);
// Reads the parts that are there, completed. Each file that cannot be read is left out, with a warning in the log.
Timeline read_parts(const std::string& folder);

// Adds what is known when all parts are together: which rank sent what another received.
void complete(Timeline& timeline);

// Writes it as a file in Chrome's trace format. Throws base::Error.
void write_file(const Timeline& timeline, const std::string& path);
// Throws base::ConfigError when it cannot be read, base::FormatError.
Timeline read_file(const std::string& path);

}  // namespace lamina::observe
