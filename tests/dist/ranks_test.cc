// SPDX-License-Identifier: Apache-2.0
#include "lamina/dist/ranks.h"

#include <gmock/gmock.h>

#include "lamina/base/error.h"
#include "lamina/dist/dist.h"
#include "tests/dist/rank_forks.h"

namespace lamina::dist {
namespace {

using ::testing::HasSubstr;
using testing::Variables;
using Answers = std::vector<std::optional<int>>;

constexpr auto kNothing = std::nullopt;

// RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK.
Answers answers(const Variables& variables) {
  const environment::Environment environment = [&](const std::string& name) {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
  Answers all;
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}) {
    all.push_back(told(name, environment));
  }
  return all;
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "127.0.0.1"},
                             {"MASTER_PORT", "29500"}};

TEST(Ranks, ComeFromAnyLauncher) {
  EXPECT_EQ(answers({}), (Answers{kNothing, kNothing, kNothing, kNothing, kNothing}));
  EXPECT_EQ(answers(kTorchrun), (Answers{5, 8, 1, 4, 1}));
  auto with_group = kTorchrun;
  with_group["GROUP_RANK"] = "3";
  EXPECT_EQ(answers(with_group), (Answers{5, 8, 1, 4, 3}));
  with_group["NODE_RANK"] = "2";
  EXPECT_EQ(answers(with_group), (Answers{5, 8, 1, 4, 2}));
  EXPECT_EQ(answers({{"SLURM_JOB_ID", "7"},
                     {"SLURM_STEP_ID", "0"},
                     {"SLURM_PROCID", "5"},
                     {"SLURM_LOCALID", "1"},
                     {"SLURM_NODEID", "1"},
                     {"SLURM_STEP_NUM_TASKS", "7"},
                     {"SLURM_STEP_NUM_NODES", "2"},
                     {"SLURM_STEP_TASKS_PER_NODE", "4,3"},
                     {"SLURM_STEP_NODELIST", "n[08-09]"}}),
            (Answers{5, 7, 1, 3, 1}));
  EXPECT_EQ(answers({{"OMPI_COMM_WORLD_RANK", "3"},
                     {"OMPI_COMM_WORLD_SIZE", "4"},
                     {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                     {"MASTER_ADDR", "10.0.0.1"}}),
            (Answers{3, 4, 1, 2, 1}));
}

TEST(Ranks, AVariableAloneIsBelievedAndAWrongOneNamed) {
  EXPECT_EQ(answers({{"WORLD_SIZE", "2"}}), (Answers{kNothing, 2, kNothing, kNothing, kNothing}));
  for (const char* text : {"two", "", "2x", "2.0", "99999999999"}) {
    try {
      answers({{"WORLD_SIZE", text}});
      ADD_FAILURE() << "no error for " << text;
    } catch (const base::ConfigError& error) {
      EXPECT_THAT(error.what(), HasSubstr(std::string("WORLD_SIZE: '") + text + "' is not allowed"));
    }
  }
}

TEST(Ranks, AProgramThatNobodyLaunchedIsRankZeroOfOne) {
  testing::alone([] {
    for (int initialized = 0; initialized < 2; ++initialized) {
      EXPECT_EQ(
          (std::vector{get_global_rank(), get_world_size(), get_local_rank(), get_local_world_size(), get_node_rank()}),
          (std::vector{0, 1, 0, 1, 0}));
      EXPECT_EQ(is_initialized(), initialized == 1);
      initialize_dist();
    }
  });
}

TEST(Ranks, TheEnvironmentMustNotChangeAfterTheStart) {
  testing::alone([] {
    initialize_dist();
    ::setenv("WORLD_SIZE", "2", 1);
    EXPECT_THROW(get_world_size(), base::UsageError);
  });
}

}  // namespace
}  // namespace lamina::dist
