// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/log.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace lamina::base {
namespace {

// Asked in a process of its own, for a process reads the variable once.
void expect_levels(const char* word, const std::string& said, const char* on_stderr) {
  const auto ask = [&] {
    ::setenv("LAMINA_LOG", word, 1);
    std::string found;
    for (const auto level : {Level::kError, Level::kWarning, Level::kInfo, Level::kDebug}) {
      found += says(level) ? 'y' : 'n';
    }
    log_warning("of something");
    std::_Exit(found == said ? 0 : 1);
  };
  EXPECT_EXIT(ask(), testing::ExitedWithCode(0), on_stderr) << word;
}

TEST(Log, LaminaLogSaysHowMuchIsSaid) {
  GTEST_FLAG_SET(death_test_style, "fast");
  expect_levels("", "yyyn", "warning: of something");
  expect_levels("info", "yyyn", "warning: of something");
  expect_levels("debug", "yyyy", "warning: of something");
  expect_levels("warning", "yynn", "warning: of something");
  expect_levels("error", "ynnn", "^$");
  expect_levels("loud", "yyyn", "LAMINA_LOG is loud, which is none of error, warning, info and debug");
}

}  // namespace
}  // namespace lamina::base
