// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

// The message of an error with a code: its first line ends with the code in brackets, and the whole with a hint, a line
// that says how to read more of it. Errors take in the messages of others, with what they end with: the hint is said
// once all the same.
namespace lamina::base {

// Makes a text printable ([Note: printable]) and gives it its code and its hint. Without a code of its own it has the
// hint of the last error that it takes in, if any. Twice is no more than once.
std::string coded(std::string_view text, std::string_view code);

// The text without hints, for what is one line, and for lists of what was found.
std::string without_hints(std::string_view text);

// The hint of a message as a line of its own, with the end of the line before it; "" where it has none.
std::string hint_of(std::string_view text);

}  // namespace lamina::base
