// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "lamina/base/coded.h"
#include "lamina/base/error.h"

namespace lamina::launch {
namespace {

using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Layout layout(const Options& options, const Variables& variables = {}, int gpus = 0) {
  const environment::Environment environment = [variables](const std::string& name) -> std::optional<std::string> {
    const auto at = variables.find(name);
    return at == variables.end() ? std::nullopt : std::optional(at->second);
  };
  return find_layout(options, {environment, [gpus] { return gpus; }});
}

std::string complaint(const Options& options, const Variables& variables = {}) {
  try {
    layout(options, variables);
  } catch (const base::ConfigError& error) {
    EXPECT_EQ(base::without_hints(error.what()).find('\n'), std::string::npos);
    return error.what();
  }
  return "no complaint";
}

TEST(Layout, TheCountIsTheOptionElseTheVariableElseTheGpusElseOne) {
  EXPECT_EQ(layout({.processes = 3}, {{"LOCAL_WORLD_SIZE", "5"}}, 8).processes, 3);
  EXPECT_EQ(layout({}, {{"LOCAL_WORLD_SIZE", "5"}}, 8).processes, 5);
  EXPECT_EQ(layout({}, {}, 8).processes, 8);
  EXPECT_EQ(layout({}).processes, 1);
}

TEST(Layout, OneMachineNeedsNothingElse) {
  const Layout found = layout({.processes = 2});
  EXPECT_EQ(found.world_size, 2);
  EXPECT_EQ(found.nodes, 1);
  EXPECT_EQ(found.base_rank, 0);
  EXPECT_EQ(found.master_address, "127.0.0.1");
  EXPECT_EQ(found.master_port, std::nullopt);
  EXPECT_FALSE(found.several_machines());
}

TEST(Layout, RanksThatJoinAJobHaveNoPlaceInIt) {
  const Options options{.processes = 2, .join = environment::HostPort{"10.0.0.1", 4711}};
  const auto found = layout(options, {{"WORLD_SIZE", "8"}, {"NODE_RANK", "3"}, {"MASTER_ADDR", "10.0.0.9"}});
  EXPECT_EQ(found.processes, 2);
  EXPECT_EQ(found.world_size, 2);
  EXPECT_EQ(found.base_rank, 0);
  EXPECT_EQ(found.master_address, "127.0.0.1");
}

TEST(Layout, AnInheritedWorldThatIsTheLocalOneCountsForNothing) {
  EXPECT_EQ(layout({.processes = 1}, {{"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "4"}}).world_size, 1);
}

TEST(Layout, AJobStartedWithinARankIsAJobOfItsOwn) {
  const Layout found = layout({.processes = 1}, {{"LAMINA_LAUNCHER", "1"},
                                                 {"WORLD_SIZE", "8"},
                                                 {"LOCAL_WORLD_SIZE", "4"},
                                                 {"NODE_RANK", "1"},
                                                 {"MASTER_ADDR", "a"},
                                                 {"MASTER_PORT", "1"}});
  EXPECT_EQ(found.world_size, 1);
  EXPECT_EQ(found.master_address, "127.0.0.1");
}

TEST(Layout, OptionsGoBeforeTheEnvironment) {
  const Variables variables{
      {"WORLD_SIZE", "6"}, {"NODE_RANK", "0"}, {"BASE_RANK", "0"}, {"MASTER_ADDR", "env"}, {"MASTER_PORT", "1111"}};
  const Layout given = layout(
      {.processes = 2, .world_size = 8, .base_rank = 4, .node_rank = 2, .master_address = "flag", .master_port = 2222},
      variables);
  EXPECT_EQ(given.world_size, 8);
  EXPECT_EQ(given.base_rank, 4);
  EXPECT_EQ(given.node_rank, 2);
  EXPECT_EQ(given.nodes, 4);
  EXPECT_EQ(given.master_address, "flag");
  EXPECT_EQ(given.master_port, 2222);
  const Layout inherited = layout({.processes = 2}, variables);
  EXPECT_EQ(inherited.world_size, 6);
  EXPECT_EQ(inherited.master_address, "env");
  EXPECT_EQ(inherited.master_port, 1111);
}

TEST(Layout, EachRankOfAMachineFollowsFromTheOther) {
  const Variables master{{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  EXPECT_EQ(layout({.processes = 2, .world_size = 6, .node_rank = 2}, master).base_rank, 4);
  EXPECT_EQ(layout({.processes = 2, .world_size = 6, .base_rank = 4}, master).node_rank, 2);
  EXPECT_EQ(layout({.processes = 2, .nodes = 3, .node_rank = 1}, master).world_size, 6);
  const Layout uneven = layout({.processes = 3, .world_size = 5, .base_rank = 2, .node_rank = 1}, master);
  EXPECT_EQ(uneven.base_rank, 2);
  EXPECT_EQ(uneven.nodes, 2);
}

TEST(Layout, WhatDoesNotFitIsNamed) {
  const Variables master{{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}};
  EXPECT_THAT(complaint({.processes = 4, .world_size = 2}), HasSubstr("--world_size 2 is less than the 4 ranks"));
  EXPECT_THAT(complaint({.processes = 2}, {{"WORLD_SIZE", "1"}}), HasSubstr("WORLD_SIZE=1 is less than the 2 ranks"));
  EXPECT_THAT(complaint({}, {{"LOCAL_WORLD_SIZE", "0"}}), HasSubstr("LOCAL_WORLD_SIZE=0"));
  EXPECT_THAT(complaint({}, {{"WORLD_SIZE", "many"}}), HasSubstr("WORLD_SIZE=many"));
  EXPECT_THAT(complaint({.processes = 2, .world_size = 4}), HasSubstr("give --node_rank or --base_rank"));
  EXPECT_THAT(complaint({.processes = 2, .world_size = 5, .node_rank = 1}, master),
              HasSubstr("cannot derive --base_rank from --node_rank 1"));
  EXPECT_THAT(complaint({.processes = 2, .world_size = 6, .base_rank = 1}, master),
              HasSubstr("cannot derive --node_rank from --base_rank 1"));
  EXPECT_THAT(complaint({.processes = 2, .world_size = 4, .node_rank = 2}, master),
              HasSubstr("the ranks here, 4 to 5 (--node_rank 2), do not fit into --world_size 4"));
  EXPECT_THAT(complaint({.processes = 2, .world_size = 4, .node_rank = 0}), HasSubstr("needs --master_addr"));
  EXPECT_THAT(complaint({.processes = 2, .world_size = 4, .node_rank = 0, .master_address = "a"}),
              HasSubstr("needs --master_port"));
  EXPECT_THAT(complaint({.processes = 2, .node_rank = 1}), HasSubstr("--node_rank 1 makes no sense"));
  EXPECT_THAT(complaint({.processes = 2}, {{"BASE_RANK", "2"}}), HasSubstr("BASE_RANK=2 makes no sense"));
  EXPECT_THAT(complaint({.processes = 2, .world_size = 5, .nodes = 2}), HasSubstr("not --nnodes 2 times 2"));
  EXPECT_THAT(complaint({}, {{"MASTER_PORT", "70000"}}), HasSubstr("MASTER_PORT=70000"));
  EXPECT_THAT(complaint({}, {{"MASTER_PORT", "0"}}), HasSubstr("MASTER_PORT=0"));
}

Variables slurm(int task, int tasks, int nodes, const std::string& per_node) {
  return {{"SLURM_JOB_ID", "77"},
          {"SLURM_JOB_NUM_NODES", std::to_string(nodes)},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_STEP_NODELIST", "gpu[07-09]"},
          {"SLURM_STEP_NUM_NODES", std::to_string(nodes)},
          {"SLURM_STEP_NUM_TASKS", std::to_string(tasks)},
          {"SLURM_STEP_TASKS_PER_NODE", per_node},
          {"SLURM_PROCID", std::to_string(task)},
          {"SLURM_LOCALID", "0"},
          {"SLURM_NODEID", std::to_string(task)}};
}

TEST(Layout, OncePerNodeOfSlurmIsAWholeJob) {
  const Layout first = layout({.processes = 4}, slurm(0, 3, 3, "1(x3)"));
  const Layout last = layout({.processes = 4}, slurm(2, 3, 3, "1(x3)"));
  for (const Layout& found : {first, last}) {
    EXPECT_EQ(found.world_size, 12);
    EXPECT_EQ(found.nodes, 3);
    EXPECT_EQ(found.master_address, "gpu07");
  }
  EXPECT_EQ(first.master_port, last.master_port);
  EXPECT_EQ(last.node_rank, 2);
  EXPECT_EQ(last.base_rank, 8);
}

TEST(Layout, APodOfKubeflowIsOneMachineOfTheJob) {
  const Variables pod{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "job-master-0"}, {"MASTER_PORT", "23456"}};
  for (const int n : {1, 2}) {
    const Layout found = layout({.processes = n}, pod);
    EXPECT_EQ(std::tuple(found.world_size, found.base_rank, found.node_rank, found.nodes), std::tuple(2 * n, n, 1, 2));
    EXPECT_EQ(found.master_address, "job-master-0");
    EXPECT_EQ(found.master_port, 23456);
  }
  auto counted = pod;  // as newer ones tell pods of several ranks
  counted["WORLD_SIZE"] = "8";
  counted["PET_NPROC_PER_NODE"] = "4";
  EXPECT_EQ(layout({}, counted).world_size, 8);
  EXPECT_EQ(layout({}, counted).base_rank, 4);
  auto alone = pod;
  alone["WORLD_SIZE"] = "1";
  alone["RANK"] = "0";
  EXPECT_FALSE(layout({.processes = 2}, alone).several_machines());
  EXPECT_EQ(layout({.processes = 2, .nodes = 4, .node_rank = 3}, pod).base_rank, 6);
}

TEST(Layout, OptionsOfTorchrunAreReadFromTheEnvironment) {
  Variables options{{"PET_NNODES", "2:2"},
                    {"PET_NPROC_PER_NODE", "4"},
                    {"PET_NODE_RANK", "1"},
                    {"PET_RDZV_ENDPOINT", "job-node-0:29400"}};
  const Layout found = layout({}, options);
  EXPECT_EQ(std::tuple(found.world_size, found.base_rank, found.node_rank), std::tuple(8, 4, 1));
  EXPECT_EQ(found.master_address, "job-node-0");
  EXPECT_EQ(found.master_port, 29400);
  options["PET_MASTER_ADDR"] = "a";
  options["PET_MASTER_PORT"] = "1234";
  EXPECT_EQ(layout({}, options).master_address, "a");
  EXPECT_EQ(layout({}, options).master_port, 1234);
  options["PET_NNODES"] = "1:4";
  EXPECT_THAT(complaint({}, options), HasSubstr("PET_NNODES=1:4: jobs here do not grow"));
}

TEST(Layout, OptionsGoBeforeSlurm) {
  const Layout found = layout({.processes = 4, .master_address = "other", .master_port = 5}, slurm(1, 3, 3, "1(x3)"));
  EXPECT_EQ(found.master_address, "other");
  EXPECT_EQ(found.master_port, 5);
  EXPECT_EQ(found.base_rank, 4);
}

TEST(Layout, SeveralLaunchersOnOneNodeAreRefused) {
  EXPECT_THAT(complaint({.processes = 4}, slurm(1, 4, 2, "2(x2)")), HasSubstr("srun --ntasks-per-node=1 lamina run"));
}

TEST(Layout, AnAllocationOfWhichOneMachineIsUsedIsPointedOut) {
  EXPECT_THAT(layout({.processes = 2}, {{"SLURM_JOB_ID", "77"}, {"SLURM_JOB_NUM_NODES", "3"}}).warning,
              HasSubstr("the allocation has 3 machines"));
  EXPECT_EQ(layout({.processes = 2}, {{"SLURM_JOB_ID", "77"}, {"SLURM_JOB_NUM_NODES", "1"}}).warning, "");
}

TEST(Layout, OncePerNodeOfOpenMpiIsAWholeJob) {
  const Layout found = layout({.processes = 2}, {{"OMPI_COMM_WORLD_RANK", "1"},
                                                 {"OMPI_COMM_WORLD_SIZE", "2"},
                                                 {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                                                 {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                                                 {"OMPI_MCA_orte_hnp_uri", "12.0;tcp://10.0.0.1,10.1.0.1:4711"},
                                                 {"PMIX_NAMESPACE", "12"}});
  EXPECT_EQ(found.base_rank, 2);
  EXPECT_EQ(found.world_size, 4);
  EXPECT_EQ(found.master_address, "10.0.0.1");
}

}  // namespace
}  // namespace lamina::launch
