// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/command_line.h"

#include <gtest/gtest.h>

namespace lamina::launch {
namespace {

Options parsed(const Arguments& words) {
  Options options;
  EXPECT_EQ(parse_run(words, options), std::nullopt);
  return options;
}

std::optional<int> code_of(const Arguments& words) {
  Options options;
  return parse_run(words, options);
}

TEST(CommandLine, OneRankIsTheDefault) { EXPECT_EQ(parsed({"train.py"}).processes, 1); }

TEST(CommandLine, EveryWordAfterTheScriptGoesToIt) {
  const Arguments target{"train.py", "-n", "3", "-h", "--", "--version", "-m", "-c", "", "-1"};
  Arguments words{"-n", "2"};
  words.insert(words.end(), target.begin(), target.end());
  const Options options = parsed(words);
  EXPECT_EQ(options.processes, 2);
  EXPECT_FALSE(options.module);
  EXPECT_FALSE(options.command);
  EXPECT_EQ(options.target, target);
}

TEST(CommandLine, TheCountMayBeWrittenInEveryUsualWay) {
  for (const Arguments& words : {Arguments{"-n", "4", "x"}, {"-n4", "x"}, {"--nproc", "4", "x"}, {"--nproc=4", "x"}}) {
    const Options options = parsed(words);
    EXPECT_EQ(options.processes, 4) << words[0];
    EXPECT_EQ(options.target, Arguments{"x"}) << words[0];
  }
}

TEST(CommandLine, ShortOptionsMayStandTogether) {
  for (const Arguments& words : {Arguments{"-mn", "4", "x", "y"}, {"-mn4", "x", "y"}}) {
    const Options options = parsed(words);
    EXPECT_TRUE(options.module);
    EXPECT_EQ(options.processes, 4);
    EXPECT_EQ(options.target, (Arguments{"x", "y"}));
  }
}

TEST(CommandLine, TwoDashesBeforeTheScriptAreDropped) {
  EXPECT_EQ(parsed({"-c", "--", "-odd-name", "--"}).target, (Arguments{"-odd-name", "--"}));
}

TEST(CommandLine, ANegativeCountIsReadAsOne) { EXPECT_EQ(parsed({"-n", "-1", "x"}).processes, -1); }

TEST(CommandLine, WrongOptionsEndWith2) {
  EXPECT_EQ(code_of({"--frob", "x"}), 2);
  EXPECT_EQ(code_of({"-n", "many", "x"}), 2);
  EXPECT_EQ(code_of({"-n", "99999999999999999999", "x"}), 2);
  EXPECT_EQ(code_of({"-n"}), 2);
}

TEST(CommandLine, HelpEndsWith0) { EXPECT_EQ(code_of({"-n", "2", "--help"}), 0); }

}  // namespace
}  // namespace lamina::launch
