// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/groups.h"

#include <ATen/ATen.h>
#include <signal.h>

#include "lamina/base/error.h"
#include "tests/collective/job_ranks.h"

namespace lamina::collective {
namespace {

using test::expect_error;
using test::in_job;
using test::JobRank;
using topology::Group;

constexpr Group kAxes[] = {Group::kWorld, Group::kMp,  Group::kDp,    Group::kPp,
                           Group::kTp,    Group::kRdp, Group::kShard, Group::kNode};

TEST(Groups, EachAxisIsMadeOnceAndHasItsRanks) {
  const auto body = [](JobRank& job) {
    std::map<Group, collective::Group*> first;
    for (const auto axis : kAxes) first[axis] = &job.group(axis);
    for (const auto axis : kAxes) {
      auto& group = job.group(axis);
      EXPECT_EQ(&group, first[axis]);
      EXPECT_EQ(group.size(), static_cast<int>(job.session.members(axis).size()));
      EXPECT_EQ(group.rank(), job.session.topology().index(axis, job.session.world().rank));
      auto count = at::ones({1});
      group.all_reduce(count, Reduction::kSum, job.call_options())->wait();
      EXPECT_EQ(count.item<double>(), group.size());
    }
    EXPECT_EQ(first[Group::kNode]->size(), 4) << "one machine";
    EXPECT_EQ(first[Group::kTp]->size() * first[Group::kShard]->size(), 1);
  };
  in_job(4, body, test::with_partitions(2));
}

TEST(Groups, MachinesAreThoseThatTheRanksTellOf) {
  test::RankForks ranks(3);
  for (const int rank : {0, 1, 2}) {  // dealt out in turn over two machines
    auto variables = ranks.variables(rank);
    variables["NODE_RANK"] = std::to_string(rank % 2);
    variables["LOCAL_RANK"] = std::to_string(rank / 2);
    variables["LOCAL_WORLD_SIZE"] = rank == 1 ? "1" : "2";
    const auto body = [rank] {
      JobRank job({}, &make_backend);
      std::vector<base::Rank> expected{base::Rank(0), base::Rank(2)};
      if (rank == 1) expected = {base::Rank(1)};
      EXPECT_EQ(job.session.members(Group::kNode), expected);
      auto sum = at::full({1}, 1. + rank);
      job.group(Group::kNode).all_reduce(sum, Reduction::kSum, job.call_options())->wait();
      EXPECT_EQ(sum.item<double>(), rank == 1 ? 2 : 4);
      job.meet();
    };
    ranks.start(rank, body, variables);
  }
  ranks.expect_success();
}

TEST(Groups, RanksThatAreToldFourVariablesFindOutWhichShareAMachine) {
  test::RankForks ranks(3);
  for (int rank = 0; rank < 3; ++rank) {
    auto variables = ranks.variables(rank);
    std::erase_if(variables, [](const auto& each) {
      return each.first != "RANK" && each.first != "WORLD_SIZE" && !each.first.starts_with("MASTER_");
    });
    const auto body = [rank] {
      JobRank job({}, &make_gloo);
      EXPECT_EQ(job.session.members(Group::kNode).size(), 3U);
      EXPECT_EQ(job.session.world().local_rank, rank);
      EXPECT_EQ(job.session.world().local_size, 3);
      job.meet();
    };
    ranks.start(rank, body, variables);
  }
  ranks.expect_success();
}

// Four ranks on two machines, whose sharding group is all of them; `killed` ends by a signal.
void on_two_machines(const std::function<void(JobRank&, collective::Group&)>& body,
                     const std::vector<int>& killed = {}) {
  test::RankForks ranks(4);
  for (int rank = 0; rank < 4; ++rank) {
    auto variables = ranks.variables(rank);
    variables["NODE_RANK"] = std::to_string(rank / 2);
    variables["LOCAL_RANK"] = std::to_string(rank % 2);
    variables["LOCAL_WORLD_SIZE"] = "2";
    const auto start = [&] {
      config::Config config;
      config.ddp = true;
      config.sharded_data_parallel_degree = 4;
      JobRank job(config, &make_gloo);
      body(job,
           job.session.groups().by_levels(Group::kShard, Group::kShardWithin, Group::kShardAcross, job.patience()));
    };
    ranks.start(rank, start, variables);
  }
  ranks.expect_success(killed);
}

TEST(Groups, OneByLevelsHasTheStoryOfAnyOther) {
  on_two_machines([](JobRank& job, collective::Group& group) {
    EXPECT_EQ(group.rank(), job.rank());
    auto all = at::empty({8}), sum = at::ones({3}), part = at::empty({2});
    group.all_gather(all, at::full({2}, 1. * job.rank()), job.call_options())->wait();
    EXPECT_TRUE(at::equal(all, at::tensor({0., 0., 1., 1., 2., 2., 3., 3.}, at::kFloat)));
    group.reduce_scatter(part, all, Reduction::kSum, job.call_options())->wait();
    EXPECT_TRUE(at::equal(part, at::full({2}, 4. * job.rank())));
    group.all_reduce(sum, Reduction::kSum, job.call_options())->wait();
    EXPECT_TRUE(at::equal(sum, at::full({3}, 4.)));
    group.barrier(job.call_options())->wait();
    EXPECT_FALSE(group.shares_memory());
    const auto absent = [&] {
      const CallOptions call_options{"gathering parameters", job.patience(std::chrono::milliseconds(300))};
      group.all_gather(all, part, call_options)->wait();
    };
    if (job.rank() != 3) expect_error<base::TimeoutError>(absent, "gathering parameters over ranks 0-3 without rank 3");
    job.meet();
    job.session.groups().close();
  });
}

// Calls `body` on each of two ranks, of which the second has a buffer of that size.
void with_buffers(const std::string& size, const std::function<void(int rank)>& body) {
  test::RankForks ranks(2);
  for (int rank = 0; rank < 2; ++rank) {
    auto variables = ranks.variables(rank);
    if (rank == 1) variables["SMDDP_AG_SORT_BUFFER_SIZE_BYTES"] = size;
    ranks.start(rank, [&] { body(rank); }, variables);
  }
  ranks.expect_success();
}

TEST(Groups, BuffersThatDifferBetweenMembersAreRefused) {
  with_buffers("8192", [](int /*rank*/) {
    JobRank job({}, &make_gloo);
    const auto make = [&] { job.session.groups().by_levels(Group::kWorld, Group::kNode, Group::kTp, job.patience()); };
    expect_error<base::DesyncError>(make, "SMDDP_AG_SORT_BUFFER_SIZE_BYTES are 16777216 and ");
    job.meet();
  });
}

TEST(Groups, ABufferOfNoMultipleIsRefusedBeforeAnythingIsStarted) {
  with_buffers("8193", [](int rank) {
    if (rank == 0) return;
    expect_error<base::UsageError>([] { JobRank({}, &make_gloo); },
                                   "'8193' is not allowed; expected a multiple of 8192");
  });
}

TEST(Groups, OneByLevelsNamesAMemberThatDies) {
  const auto body = [](JobRank& job, collective::Group& group) {
    auto all = at::empty({8}), part = at::ones({2});
    auto began = std::chrono::steady_clock::now();
    const auto gather = [&] {
      group.all_gather(all, part, job.call_options())->wait();
      began = std::chrono::steady_clock::now();
    };
    if (job.rank() == 3) {
      gather();
      ::raise(SIGKILL);
    }
    // A slow rank may still wait for the first one as it hears.
    expect_error<base::PeerError>([&] { (gather(), gather()); }, "rank 3 is lost");
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(5));
  };
  on_two_machines(body, {3});
}

TEST(Groups, RanksThatMakeDifferentOnesAreTold) {
  const auto body = [](JobRank& job) {
    const auto axis = job.rank() == 0 ? Group::kPp : Group::kWorld;  // of the same ranks
    expect_error<base::DesyncError>([&] { job.group(axis); }, "all ranks of a group make the same calls");
  };
  in_job(2, body, test::with_partitions(2));
}

TEST(Groups, MakingThemInACircleEndsWithAnErrorOnAll) {
  const auto body = [](JobRank& job) {
    const bool pipeline_first = job.rank() == 0 || job.rank() == 3;
    expect_error<base::DesyncError>([&] { job.group(pipeline_first ? Group::kPp : Group::kDp); },
                                    "ranks wait for each other");
  };
  in_job(4, body, test::with_partitions(2));
}

TEST(Groups, OneThatOthersDoNotComeToIsLeftBehindAtOnce) {
  test::wait_alone([](JobRank& job, auto& group) {
    std::vector<Started> ahead;  // nobody has waited for them
    for (int i = 0; i < 4; ++i) ahead.push_back(group.all_gather(at::empty({4}), at::ones({2}), job.call_options()));
    const auto began = std::chrono::steady_clock::now();
    EXPECT_EQ(group.stuck(), job.gloo);  // which cannot give a collective up
    job.session.groups().close();
    EXPECT_EQ(job.session.groups().stuck(), job.gloo);
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(2));
  });
}

TEST(Groups, WhatAllHaveBegunEndsBeforeTheyAreClosed) {
  in_job(2, [](JobRank& job) {
    auto& group = job.group();
    const auto begun = group.all_gather(at::empty({4}), at::ones({2}), job.call_options());
    auto dropped = group.all_gather(at::empty({4}), at::ones({2}), job.call_options());
    dropped.reset();
    begun->wait();
    job.meet();
    if (job.gloo) {
      EXPECT_FALSE(group.stuck()) << "all have begun both";
    }
    job.meet();
  });
}

TEST(Groups, AfterTheirEndThereAreNone) {
  in_job(2, [](JobRank& job) {
    job.group();
    job.session.groups().close();
    expect_error<base::UsageError>([&] { job.group(); }, "the group WORLD of a job that was shut down");
  });
}

}  // namespace
}  // namespace lamina::collective
