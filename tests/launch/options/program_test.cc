// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/program.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include "lamina/base/error.h"

namespace lamina::launch {
namespace {

class ProgramTest : public testing::Test {
 protected:
  void SetUp() override { ::setenv("LAMINA_PYTHON", "/bin/sh", 1); }
  void TearDown() override { ::unsetenv("LAMINA_PYTHON"); }
};

TEST_F(ProgramTest, AScriptIsGivenToTheInterpreter) {
  const Program program = find_program({.target = {"/dev/null", "-x"}});
  EXPECT_EQ(program.path, "/bin/sh");
  EXPECT_EQ(program.arguments, (std::vector<std::string>{"/bin/sh", "/dev/null", "-x"}));
}

TEST_F(ProgramTest, AModuleIsGivenToTheInterpreterByName) {
  const Program program = find_program({.module = true, .target = {"pkg.tool", "a"}});
  EXPECT_EQ(program.arguments, (std::vector<std::string>{"/bin/sh", "-m", "pkg.tool", "a"}));
}

TEST_F(ProgramTest, ACommandIsFoundInThePath) {
  const Program program = find_program({.command = true, .target = {"sh", "-c", "true"}});
  EXPECT_TRUE(program.path.ends_with("/sh"));
  EXPECT_EQ(program.arguments, (std::vector<std::string>{"sh", "-c", "true"}));
}

TEST_F(ProgramTest, WhatIsMissingIsAnErrorThatNamesIt) {
  EXPECT_THROW(find_program({.target = {"/no/such.py"}}), base::ConfigError);
  EXPECT_THROW(find_program({.command = true, .target = {"no-such-program"}}), base::ConfigError);
  EXPECT_THROW(find_program({.command = true, .target = {"/tmp"}}), base::ConfigError);  // a folder
  ::setenv("LAMINA_PYTHON", "/no/python", 1);
  EXPECT_THROW(find_program({.module = true, .target = {"pkg"}}), base::ConfigError);
}

TEST(FindInterpreter, FallsBackToPython3) {
  ::unsetenv("LAMINA_PYTHON");
  EXPECT_TRUE(find_interpreter().ends_with("/python3"));  // no python lies beside this test
}

}  // namespace
}  // namespace lamina::launch
