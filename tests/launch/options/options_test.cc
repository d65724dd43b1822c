// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/options.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"

namespace lamina::launch {
namespace {

std::string complaint(const Options& options) {
  try {
    options.validate();
  } catch (const base::ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Options, AScriptIsEnough) { EXPECT_EQ(complaint({.target = {"train.py"}}), ""); }

TEST(Options, EveryWrongFieldIsNamedInOneLine) {
  const std::string line = complaint({.processes = 0, .module = true, .command = true, .target = {}});
  EXPECT_NE(line.find("-n must be 1 or greater, not 0"), std::string::npos) << line;
  EXPECT_NE(line.find("-m (a Python module) and -c (a program) exclude each other"), std::string::npos) << line;
  EXPECT_NE(line.find("say what to run"), std::string::npos) << line;
  EXPECT_EQ(line.find('\n'), std::string::npos) << line;
}

TEST(Options, AnEmptyScriptNameIsNone) { EXPECT_NE(complaint({.target = {""}}), ""); }

}  // namespace
}  // namespace lamina::launch
