// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/groups.h"

#include <ATen/ATen.h>

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
      group.all_reduce(count, Reduction::kSum, job.terms())->wait();
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
      job.group(Group::kNode).all_reduce(sum, Reduction::kSum, job.terms())->wait();
      EXPECT_EQ(sum.item<double>(), rank == 1 ? 2 : 4);
      job.meet();
    };
    ranks.start(rank, body, variables);
  }
  ranks.expect_success();
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

TEST(Groups, AfterTheirEndThereAreNone) {
  in_job(2, [](JobRank& job) {
    job.group();
    job.session.groups().close();
    expect_error<base::UsageError>([&] { job.group(); }, "the group WORLD of a job that was shut down");
  });
}

}  // namespace
}  // namespace lamina::collective
