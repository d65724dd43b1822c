// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace lamina::base {

// [Note: printable] Names of files and folders, tags, and what is in files may come from strangers, and a terminal
// obeys escape sequences in them. All text of ours that goes to a terminal or a log is made printable where it leaves.
// Errors do it in their constructor, lines of the log and of the launcher where they are written, and the commands in
// `command::say`. A character that a terminal may obey, or that changes the direction in which others are read, becomes
// "\x1b", and so does each byte that is no UTF-8. What is printable stays as it is, so twice is no more than once.

// Text of several lines: tabs and ends of lines stay.
std::string printable(std::string_view text);

// A text, such as a name, that is not to look like several lines: these become "\x0a", too.
std::string printable_line(std::string_view text);

}  // namespace lamina::base
