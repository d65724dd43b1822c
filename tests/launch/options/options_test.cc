// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/options.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"

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

TEST(CommandLine, TheCountNeedNotBeGiven) { EXPECT_EQ(parsed({"train.py"}).processes, std::nullopt); }

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

TEST(CommandLine, LongOptionsMayBeAbbreviated) {
  EXPECT_EQ(parsed({"--np", "4", "x"}).processes, 4);
  EXPECT_EQ(parsed({"--world=4", "x"}).world_size, 4);
  EXPECT_EQ(parsed({"--verb", "x"}).target, Arguments{"x"});
  EXPECT_EQ(code_of({"--master", "4", "x"}), 2) << "of two options";
}

TEST(CommandLine, ComposersOptions) {
  const Options options =
      parsed({"--nproc", "2", "--world_size", "8", "--base_rank", "4", "--node_rank", "2", "--master_addr", "host",
              "--master_port", "4711", "--stdout", "o{rank}", "--stderr", "e{rank}", "-v", "x"});
  EXPECT_EQ(options.processes, 2);
  EXPECT_EQ(options.world_size, 8);
  EXPECT_EQ(options.base_rank, 4);
  EXPECT_EQ(options.node_rank, 2);
  EXPECT_EQ(options.master_address, "host");
  EXPECT_EQ(options.master_port, 4711);
  EXPECT_EQ(options.output_pattern, "o{rank}");
  EXPECT_EQ(options.error_pattern, "e{rank}");
  EXPECT_TRUE(options.verbose);
}

TEST(CommandLine, TorchrunsOptions) {
  const Options options = parsed({"--nproc-per-node=2", "--nnodes", "3", "--node-rank=1", "--master-addr", "host",
                                  "--master-port=4711", "--max-restarts=3", "--standalone", "--no-python", "x"});
  EXPECT_EQ(options.processes, 2);
  EXPECT_EQ(options.nodes, 3);
  EXPECT_EQ(options.node_rank, 1);
  EXPECT_EQ(options.master_address, "host");
  EXPECT_EQ(options.master_port, 4711);
  EXPECT_EQ(options.restarts, 3);
  EXPECT_TRUE(options.command);
  EXPECT_EQ(parsed({"--nproc_per_node", "gpu", "x"}).processes, std::nullopt);
  EXPECT_EQ(code_of({"--nnodes", "1:4", "x"}), 2);
  EXPECT_EQ(code_of({"--rdzv-backend", "c10d", "x"}), 2);
  EXPECT_EQ(code_of({"--rdzv_endpoint=host:1", "x"}), 2);
}

TEST(CommandLine, ElasticTakesALeastAndAMostNumber) {
  EXPECT_EQ(parsed({"--elastic", "2", "x"}).least, 2);
  EXPECT_EQ(parsed({"--elastic", "2", "x"}).most, std::nullopt);
  EXPECT_EQ(parsed({"--elastic=2:4", "x"}).least, 2);
  EXPECT_EQ(parsed({"--elastic=2:4", "x"}).most, 4);
  for (const char* text : {"", ":", "2:", ":2", "a", "2:b", "1:2:3", "99999999999"}) {
    EXPECT_EQ(code_of({"--elastic", text, "x"}), 2) << text;
  }
}

TEST(CommandLine, JoinTakesAHostAndAPort) {
  const auto join = [](const char* text) { return parsed({"--join", text, "x"}).join->text(); };
  EXPECT_EQ(join("10.0.0.1:4711"), "10.0.0.1:4711");
  EXPECT_EQ(join("host.local:1"), "host.local:1");
  EXPECT_EQ(join("[::1]:65535"), "[::1]:65535");
  EXPECT_EQ(parsed({"--join", "[::1]:4711", "x"}).join->host, "::1");
  for (const char* text : {"", ":", "host", "host:", ":4711", "host:0", "host:65536", "host:port", "host:1:"}) {
    EXPECT_EQ(code_of({"--join", text, "x"}), 2) << text;
  }
  const Options options = parsed({"--join-port", "4711", "--join-every", "0", "--spare-wait", "9", "x"});
  EXPECT_EQ(options.join_port, 4711);
  EXPECT_EQ(options.join_every, std::chrono::seconds(0));
  EXPECT_EQ(options.spare_wait, std::chrono::seconds(9));
  EXPECT_FALSE(options.join);
}

TEST(CommandLine, VariablesMayBeGivenManyTimes) {
  EXPECT_EQ(parsed({"-x", "A=1", "-x", "B", "x"}).variables, (std::vector<std::string>{"A=1", "B"}));
}

TEST(CommandLine, HelpEndsWith0) { EXPECT_EQ(code_of({"-n", "2", "--help"}), 0); }

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

TEST(Options, RanksThatJoinAJobHaveNoPlaceOfTheirOwn) {
  const environment::HostPort join{"10.0.0.1", 4711};
  EXPECT_EQ(complaint({.processes = 2, .join = join, .secret_file = "secret", .target = {"x"}}), "");
  EXPECT_EQ(complaint({.join = join, .target = {"x"}}),
            "--join needs --secret-file: the file that the launchers of the job have");
  EXPECT_EQ(complaint({.nodes = 2,
                       .node_rank = 1,
                       .master_address = "a",
                       .join = join,
                       .secret_file = "secret",
                       .target = {"x"},
                       .restarts = 1,
                       .least = 1}),
            "--join has the job that runs say where its ranks are: leave out --nnodes, --node_rank, --master_addr, "
            "--elastic, --restarts");
}

TEST(Options, AnEmptyScriptNameIsNone) { EXPECT_NE(complaint({.target = {""}}), ""); }

}  // namespace
}  // namespace lamina::launch
