// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/printable.h"

#include <gtest/gtest.h>

namespace lamina::base {
namespace {

TEST(Printable, KeepsWhatATerminalOnlyShows) {
  for (const auto* text : {"", "a b\\x1b~", "\u00e9 \u4e2d \U0001f600", "two\n\tlines"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, ShowsWhatATerminalObeysAndIsTheSameTwice) {
  const std::pair<std::string, std::string> cases[] = {
      {"\x1b[31m", "\\x1b[31m"},                                   // an escape sequence
      {std::string("a\0b", 3), "a\\x00b"},                         // a NUL, at which a C string ends
      {"a\rb\x7f", "a\\x0db\\x7f"},                                // what overwrites a line
      {"\u009b31m", "\\xc2\\x9b31m"},                              // a control of eight bits
      {"\u202egnp.\u2066", "\\xe2\\x80\\xaegnp.\\xe2\\x81\\xa6"},  // what turns the direction
      {"\x9b\xff\xc3", "\\x9b\\xff\\xc3"},                         // no UTF-8
      {"\xc0\x9b\xed\xa0\x80", "\\xc0\\x9b\\xed\\xa0\\x80"},       // longer than it need be, and half a pair
  };
  for (const auto& [text, shown] : cases) {
    EXPECT_EQ(printable(text), shown);
    EXPECT_EQ(printable(shown), shown);
  }
}

TEST(Printable, ALineStaysOne) { EXPECT_EQ(printable_line("a\n\tb"), "a\\x0a\\x09b"); }

}  // namespace
}  // namespace lamina::base
