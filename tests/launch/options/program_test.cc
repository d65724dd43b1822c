// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/program.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>

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

Options without_python(Options options) {
  leave_out_python(options);
  return options;
}

TEST_F(ProgramTest, TheWordPythonIsLeftOut) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(without_python({.target = {"python", "train.py", "-n", "2"}}).target, (Words{"train.py", "-n", "2"}));
  EXPECT_EQ(without_python({.target = {"python3.12", "train.py"}}).target, (Words{"train.py"}));
  const auto module = without_python({.target = {"python3", "-m", "pkg", "a"}});
  EXPECT_TRUE(module.module);
  EXPECT_EQ(module.target, (Words{"pkg", "a"}));
  const auto with_option = without_python({.target = {"python3", "-u", "train.py"}});
  EXPECT_TRUE(with_option.command);
  EXPECT_EQ(with_option.target, (Words{"python3", "-u", "train.py"}));
}

TEST_F(ProgramTest, APathOfAnInterpreterIsStartedAsItIs) {
  const auto folder = testing::TempDir() + "interpreter";
  std::filesystem::create_directories(folder);
  std::filesystem::remove(folder + "/python3");
  std::filesystem::create_symlink("/bin/sh", folder + "/python3");
  EXPECT_TRUE(without_python({.target = {folder + "/python3", "train.py"}}).command);
  EXPECT_FALSE(without_python({.target = {folder + "/python9", "train.py"}}).command);  // is not there
}

TEST_F(ProgramTest, WhatOnlyLooksLikeAnInterpreterStays) {
  for (const auto* name : {"pythonic", "python.py", "train.py", "/dev/null"}) {
    const auto options = without_python({.target = {name, "a"}});
    EXPECT_EQ(options.target.front(), name);
    EXPECT_FALSE(options.command || options.module);
  }
  EXPECT_EQ(without_python({.target = {"python"}}).target.size(), 1U);
  EXPECT_EQ(without_python({.module = true, .target = {"python", "a"}}).target.size(), 2U);
}

TEST(FindInterpreter, FallsBackToPython3) {
  ::unsetenv("LAMINA_PYTHON");
  EXPECT_TRUE(find_interpreter().ends_with("/python3"));  // no python lies beside this test
}

}  // namespace
}  // namespace lamina::launch
