// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/cluster_task.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "lamina/base/error.h"
#include "lamina/environment/world.h"

namespace lamina::environment {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

Environment environment(Variables variables) {
  return [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto at = variables.find(name);
    return at == variables.end() ? std::nullopt : std::optional(at->second);
  };
}

Variables srun() {
  return {{"SLURM_JOB_ID", "77"},
          {"SLURM_PROCID", "5"},
          {"SLURM_LOCALID", "1"},
          {"SLURM_NODEID", "1"},
          {"SLURM_STEP_ID", "3"},
          {"SLURM_STEP_NUM_TASKS", "7"},
          {"SLURM_STEP_NUM_NODES", "2"},
          {"SLURM_STEP_TASKS_PER_NODE", "4,3"},
          {"SLURM_STEP_NODELIST", "n[08-09]"}};
}

TEST(ExpandHosts, ListsAndRangesAndBothTogether) {
  EXPECT_THAT(expand_hosts("login"), ElementsAre("login"));
  EXPECT_THAT(expand_hosts("a,b"), ElementsAre("a", "b"));
  EXPECT_THAT(expand_hosts("gpu[08-10,7]-ib,login"),
              ElementsAre("gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu7-ib", "login"));
  EXPECT_THAT(expand_hosts("r[1-2]n[1-2]"), ElementsAre("r1n1", "r1n2", "r2n1", "r2n2"));
  EXPECT_THAT(expand_hosts(""), ElementsAre());
  EXPECT_THAT(expand_hosts("n[1-999999999]", 2), ElementsAre("n1", "n2"));
  EXPECT_THAT(expand_hosts("n[3-1],m"), ElementsAre("m"));
  EXPECT_THAT(expand_hosts("n[1"), ElementsAre("n[1"));
}

TEST(ClusterTask, OfSrunIsReadFromItsStep) {
  const auto task = cluster_task(environment(srun()));
  ASSERT_TRUE(task);
  EXPECT_EQ(task->rank, 5);
  EXPECT_EQ(task->size, 7);
  EXPECT_EQ(task->local_rank, 1);
  EXPECT_EQ(task->local_size, 3);
  EXPECT_EQ(task->nodes, 2);
  EXPECT_EQ(task->node, 1);
  EXPECT_EQ(task->first_host, "n08");
  EXPECT_EQ(task->job, "77.3");
}

TEST(ClusterTask, ABatchScriptIsNone) {
  EXPECT_FALSE(cluster_task(environment({{"SLURM_JOB_ID", "7"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}})));
}

TEST(ClusterTask, AloneIsNone) {
  auto variables = srun();
  variables["SLURM_STEP_NUM_TASKS"] = "1";
  EXPECT_FALSE(cluster_task(environment(variables)));
}

TEST(ClusterTask, OfMpirunIsReadEvenIfSrunStartedIt) {
  auto variables = srun();
  variables["OMPI_COMM_WORLD_RANK"] = "2";
  variables["OMPI_COMM_WORLD_SIZE"] = "4";
  variables["OMPI_COMM_WORLD_LOCAL_RANK"] = "0";
  variables["OMPI_COMM_WORLD_LOCAL_SIZE"] = "2";
  const auto task = cluster_task(environment(variables));
  EXPECT_EQ(task->launcher, "mpirun");
  EXPECT_EQ(task->rank, 2);
  EXPECT_EQ(task->nodes, 2);
  EXPECT_EQ(task->node, 1);
  EXPECT_EQ(task->first_host, "n08");
}

TEST(ClusterTask, OfMpichOnOneMachineMeetsThere) {
  const auto task = cluster_task(
      environment({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}}));
  EXPECT_EQ(task->local_rank, 1);
  EXPECT_EQ(task->first_host, "127.0.0.1");
}

TEST(ClusterTask, NonsenseIsAnErrorThatNamesIt) {
  auto variables = srun();
  variables["SLURM_PROCID"] = "x";
  EXPECT_THROW(cluster_task(environment(variables)), base::ConfigError);
  variables["SLURM_PROCID"] = "7";
  try {
    cluster_task(environment(variables));
    FAIL();
  } catch (const base::ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("task 7 of 7"));
  }
}

TEST(World, OfSrunNeedsNoOtherLauncher) {
  const World world = read_world(environment(srun()));
  EXPECT_EQ(world.rank, base::Rank(5));
  EXPECT_EQ(world.size, 7);
  EXPECT_EQ(world.local_rank, 1);
  EXPECT_EQ(world.local_size, 3);
  EXPECT_EQ(world.node_rank, 1);
  EXPECT_EQ(world.master_addr, "n08");
  EXPECT_EQ(world.master_port, port_of("77.3"));
  EXPECT_TRUE(world.launched);
}

TEST(World, OfSrunTakesAGivenMeetingPoint) {
  auto variables = srun();
  variables["MASTER_ADDR"] = "other";
  variables["MASTER_PORT"] = "4711";
  const World world = read_world(environment(variables));
  EXPECT_EQ(world.master_addr, "other");
  EXPECT_EQ(world.master_port, 4711);
}

TEST(World, OfMpirunOverMachinesItCannotNameAsksForTheFirst) {
  const Variables variables{{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};
  try {
    read_world(environment(variables));
    FAIL();
  } catch (const base::ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("MASTER_ADDR is not set"));
  }
}

TEST(PortOf, LiesBelowThoseThatSystemsGiveOut) {
  for (const char* job : {"", "77.3", "a long name of a job"}) {
    EXPECT_GE(port_of(job), 20000);
    EXPECT_LT(port_of(job), 32000);
  }
}

}  // namespace
}  // namespace lamina::environment
