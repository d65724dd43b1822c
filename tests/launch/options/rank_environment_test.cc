// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/rank_environment.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "lamina/base/error.h"

namespace lamina::launch {
namespace {

Job job(int cores = 8) {
  return {.master_port = 4711, .run_id = "job", .world_size = 3, .local_world_size = 3, .cores = cores};
}

const Place kPlace{.rank = base::Rank(2), .local_rank = 2, .secret_fd = 9};

bool holds(const Variables& environment, const std::string& entry) {
  return std::ranges::find(environment, entry) != environment.end();
}

std::ptrdiff_t count(const Variables& environment, const std::string& name) {
  return std::ranges::count_if(environment, [&](const auto& entry) { return entry.starts_with(name + "="); });
}

TEST(RankEnvironment, KeepsTorchrunsContract) {
  const auto environment = rank_environment(job(), kPlace, {});
  for (const char* entry :
       {"RANK=2", "LOCAL_RANK=2", "WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3", "GROUP_RANK=0", "GROUP_WORLD_SIZE=1",
        "ROLE_RANK=2", "ROLE_WORLD_SIZE=3", "ROLE_NAME=default", "NODE_RANK=0", "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=4711", "TORCHELASTIC_RUN_ID=job", "TORCHELASTIC_RESTART_COUNT=0", "PYTHONUNBUFFERED=1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1", "LAMINA_LAUNCHER=1", "LAMINA_SECRET_FD=9"}) {
    EXPECT_TRUE(holds(environment, entry)) << entry;
  }
}

TEST(RankEnvironment, TellsNewcomersHowTheyCome) {
  auto elastic = job();
  elastic.least = 1, elastic.most = 4;
  auto place = kPlace;
  for (const char* name : {"LAMINA_NEWCOMER", "LAMINA_JOIN_EVERY", "LAMINA_SPARE_WAIT", "LAMINA_DOORKEEPER"}) {
    EXPECT_EQ(count(rank_environment(elastic, place, {std::string(name) + "=7"}), name), 0) << name;
  }
  elastic.join_every = std::chrono::seconds(5), elastic.spare_wait = std::chrono::seconds(9);
  elastic.doorkeeper = "10.0.0.1 4711";
  place.newcomer = 3;
  const auto environment = rank_environment(elastic, place, {});
  for (const char* entry : {"LAMINA_ELASTIC=1:4", "LAMINA_NEWCOMER=3", "LAMINA_JOIN_EVERY=5", "LAMINA_SPARE_WAIT=9",
                            "LAMINA_DOORKEEPER=10.0.0.1 4711"}) {
    EXPECT_TRUE(holds(environment, entry)) << entry;
  }
}

TEST(RankEnvironment, ReplacesWhatAnOuterLauncherSaid) {
  const auto environment = rank_environment(
      job(), kPlace,
      {"RANK=7", "LAMINA_SECRET_FD=3", "TORCHELASTIC_USE_AGENT_STORE=True", "TORCHELASTIC_ERROR_FILE=/x"});
  EXPECT_TRUE(holds(environment, "RANK=2"));
  EXPECT_EQ(count(environment, "RANK"), 1);
  EXPECT_EQ(count(environment, "LAMINA_SECRET_FD"), 1);
  EXPECT_EQ(count(environment, "TORCHELASTIC_USE_AGENT_STORE"), 0);
  EXPECT_EQ(count(environment, "TORCHELASTIC_ERROR_FILE"), 0);
}

TEST(CommonEnvironment, HasAllButWhatTheLauncherAloneSays) {
  const auto environment =
      common_environment(job(), {"COLOUR=red", "RANK=7", "LAMINA_SECRET_FD=3", "UCX_MEM_EVENTS=y"});
  for (const char* entry : {"COLOUR=red", "UCX_MEM_EVENTS=y", "OMP_NUM_THREADS=2", "PYTHONUNBUFFERED=1"}) {
    EXPECT_TRUE(holds(environment, entry)) << entry;
  }
  for (const char* name : {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "LAMINA_SECRET_FD", "LAMINA_RESTART"}) {
    EXPECT_EQ(count(environment, name), 0) << name;
  }
}

TEST(RankEnvironment, PassesOnWhatIsNotItsBusiness) {
  const auto environment = rank_environment(job(), kPlace, {"HOME=/root", "EMPTY=", "RANKS=5"});
  for (const char* entry : {"HOME=/root", "EMPTY=", "RANKS=5"}) EXPECT_TRUE(holds(environment, entry)) << entry;
}

TEST(RankEnvironment, SaysHowManyGoOnWithoutOthersWhereSomeMay) {
  Job elastic = job();
  elastic.least = 2;
  EXPECT_EQ(count(rank_environment(job(), kPlace, {"LAMINA_ELASTIC=3"}), "LAMINA_ELASTIC"), 0);
  EXPECT_TRUE(holds(rank_environment(elastic, kPlace, {"LAMINA_ELASTIC=3"}), "LAMINA_ELASTIC=2"));
  elastic.most = 4;
  EXPECT_TRUE(holds(rank_environment(elastic, kPlace, {}), "LAMINA_ELASTIC=2:4"));
}

TEST(RankEnvironment, SaysToARankThatIsStartedAgainThatItJoinsOthersAndWhere) {
  const Variables outer{"LAMINA_DOOR_FD=3", "LAMINA_NEWCOMER=1"};
  const auto first = rank_environment(job(), kPlace, outer);
  EXPECT_EQ(count(first, "LAMINA_DOOR_FD") + count(first, "LAMINA_NEWCOMER"), 0) << "another job's";
  auto place = kPlace;
  place.door_fd = 7;
  place.newcomer = 1;
  const auto again = rank_environment(job(), place, outer);
  EXPECT_TRUE(holds(again, "LAMINA_DOOR_FD=7"));
  EXPECT_TRUE(holds(again, "LAMINA_NEWCOMER=1"));
}

TEST(RankEnvironment, SharesTheCoresAmongTheRanks) {
  EXPECT_TRUE(holds(rank_environment(job(), kPlace, {}), "OMP_NUM_THREADS=2"));
  EXPECT_TRUE(holds(rank_environment(job(2), kPlace, {}), "OMP_NUM_THREADS=1"));
}

TEST(RankEnvironment, DefaultsYieldToTheUser) {
  const auto defaults = rank_environment(job(), kPlace, {});
  EXPECT_TRUE(holds(defaults, "UCX_HANDLE_ERRORS=none"));
  EXPECT_TRUE(holds(defaults, "UCX_MEM_EVENTS=n"));
  const Variables own{"OMP_NUM_THREADS=5", "UCX_HANDLE_ERRORS=bt", "UCX_MEM_EVENTS=y"};
  const auto environment = rank_environment(job(), kPlace, own);
  for (const std::string& entry : own) EXPECT_TRUE(holds(environment, entry)) << entry;
  EXPECT_EQ(count(environment, "OMP_NUM_THREADS"), 1);
}

// Never accepted and then overwritten.
TEST(WithVariables, WhatItSetsIsWhatRanksReadElseItIsRefused) {
  constexpr Place kFull{.secret_fd = 9, .progress_fd = 8};
  for (const std::string& entry : rank_environment(job(), kFull, {})) {
    const std::string own = entry.substr(0, entry.find('=')) + "=own";
    if (holds(rank_environment(job(), kFull, {own}), own)) {
      EXPECT_EQ(with_variables({}, {own}, "-x"), Variables{own});
    } else {
      EXPECT_THROW(with_variables({}, {own}, "-x"), base::ConfigError) << own;
    }
  }
}

}  // namespace
}  // namespace lamina::launch
