// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/group.h"

#include <ATen/ATen.h>

#include "lamina/base/error.h"
#include "tests/collective/job_ranks.h"

namespace lamina::collective {
namespace {

using test::in_job;
using test::JobRank;
using topology::Group;
using CollectiveKind = Reduction;

// Different on each rank, and small enough for exact sums.
at::Tensor numbers(int rank, std::int64_t count) { return at::arange(count, at::kDouble) + 100. * (rank + 1); }

at::Tensor stacked(int size, std::int64_t count) {
  std::vector<at::Tensor> rows;
  for (int rank = 0; rank < size; ++rank) rows.push_back(numbers(rank, count));
  return at::stack(rows);  // by rank
}

void reduces(JobRank& job, collective::Group& group) {
  const auto all = stacked(group.size(), 5);
  const std::pair<CollectiveKind, at::Tensor> expected[] = {{CollectiveKind::kSum, all.sum(0)},
                                                            {CollectiveKind::kMax, all.amax(0)},
                                                            {CollectiveKind::kMin, all.amin(0)},
                                                            {CollectiveKind::kProduct, all.prod(0)}};
  for (const auto& [reduction, result] : expected) {
    auto tensor = numbers(group.rank(), 5);
    group.all_reduce(tensor, reduction, job.call_options())->wait();
    EXPECT_TRUE(at::equal(tensor, result));
    const int root = group.size() - 1;
    tensor = numbers(group.rank(), 5);
    group.reduce(tensor, reduction, root, job.call_options())->wait();
    if (group.rank() == root) EXPECT_TRUE(at::equal(tensor, result));
    auto part = at::empty({5}, at::kDouble);
    group.reduce_scatter(part, numbers(group.rank(), 5 * group.size()), reduction, job.call_options())->wait();
    auto whole = numbers(group.rank(), 5 * group.size());
    group.all_reduce(whole, reduction, job.call_options())->wait();
    EXPECT_TRUE(at::equal(part, whole.narrow(0, 5 * group.rank(), 5)));
  }
  const auto bits = at::full({2}, std::int64_t{1} << group.rank());
  const auto every = (std::int64_t{1} << group.size()) - 1;
  const std::pair<CollectiveKind, std::int64_t> of_bits[] = {
      {CollectiveKind::kBitOr, every}, {CollectiveKind::kBitXor, every}, {CollectiveKind::kBitAnd, 0}};
  for (const auto& [reduction, result] : of_bits) {
    auto tensor = bits.clone();
    group.all_reduce(tensor, reduction, job.call_options())->wait();
    EXPECT_TRUE(at::equal(tensor, at::full({2}, result)));
  }
}

void gathers(JobRank& job, collective::Group& group) {
  const int rank = group.rank(), size = group.size();
  auto all = at::empty({size, 3}, at::kDouble);
  group.all_gather(all, numbers(rank, 3), job.call_options())->wait();
  EXPECT_TRUE(at::equal(all, stacked(size, 3)));
  for (int root = 0; root < size; ++root) {
    auto tensor = numbers(rank, 4);
    group.broadcast(tensor, root, job.call_options())->wait();
    EXPECT_TRUE(at::equal(tensor, numbers(root, 4)));
    auto gathered = rank == root ? at::empty({size, 2, 2}, at::kDouble) : at::Tensor();
    group.gather(gathered, numbers(rank, 4).view({2, 2}), root, job.call_options())->wait();
    if (rank == root) EXPECT_TRUE(at::equal(gathered.view({size, 4}), stacked(size, 4)));
    auto part = at::empty({4}, at::kDouble);
    group.scatter(part, rank == root ? stacked(size, 4) : at::Tensor(), root, job.call_options())->wait();
    EXPECT_TRUE(at::equal(part, numbers(rank, 4)));
  }
}

void exchanges(JobRank& job, collective::Group& group) {
  const int rank = group.rank(), size = group.size();
  auto received = at::empty({size, 2}, at::kDouble);
  group.all_to_all(received, numbers(rank, 2 * size).view({size, 2}), job.call_options())->wait();
  for (int from = 0; from < size; ++from) {
    EXPECT_TRUE(at::equal(received[from], numbers(from, 2 * size).narrow(0, 2 * rank, 2)));
  }
  // Member i gets i + 1 rows of everybody.
  Rows rows{std::vector<std::int64_t>(size, rank + 1), {}};
  for (int to = 0; to < size; ++to) rows.sent.push_back(to + 1);
  const auto count = size * (size + 1) / 2, begin = rank * (rank + 1) / 2;
  received = at::empty({size * (rank + 1)}, at::kDouble);
  group.all_to_all(received, numbers(rank, count), job.call_options(), rows)->wait();
  for (int from = 0; from < size; ++from) {
    EXPECT_TRUE(
        at::equal(received.narrow(0, from * (rank + 1), rank + 1), numbers(from, count).narrow(0, begin, rank + 1)));
  }
  auto from_left = at::empty({3}, at::kDouble);
  const auto arrives = group.receive(from_left, (rank + size - 1) % size, job.call_options());
  const auto leaves = group.send(numbers(rank, 3), (rank + 1) % size, job.call_options());
  arrives->wait();
  leaves->wait();
  EXPECT_TRUE(at::equal(from_left, numbers((rank + size - 1) % size, 3)));
  group.barrier(job.call_options())->wait();
}

TEST(Group, EveryCollectiveGivesWhatIsComputedOverAnyNumberOfRanks) {
  for (const int size : {2, 4}) {
    in_job(size, [](JobRank& job) {
      auto& group = job.group();
      EXPECT_EQ(group.rank(), job.rank());
      reduces(job, group);
      gathers(job, group);
      exchanges(job, group);
    });
  }
}

TEST(Group, APartOfTheJobIsAGroupOfItsOwn) {
  const auto body = [](JobRank& job) {
    for (const auto axis : {Group::kPp, Group::kDp}) {
      auto sum = at::full({2}, 1. + job.rank());
      job.group(axis).all_reduce(sum, CollectiveKind::kSum, job.call_options())->wait();
      double expected = 0;
      for (const auto member : job.session.members(axis)) expected += 1. + static_cast<double>(member.value);
      EXPECT_EQ(sum[0].item<double>(), expected);
    }
  };
  in_job(4, body, test::with_partitions(2));
}

TEST(Group, SeveralAreUnderWayInTwoGroupsInAnyOrderOfTheirGroups) {
  const auto body = [](JobRank& job) {
    auto &world = job.group(), &pipeline = job.group(Group::kPp);
    std::vector<at::Tensor> in_world, in_pipeline;
    std::vector<Started> started;
    for (int i = 0; i < 4; ++i) {
      in_world.push_back(at::full({100000}, 1. * i + job.rank()));
      in_pipeline.push_back(at::full({100000}, 2. * i + job.rank()));
      const auto first = [&] {
        started.push_back(world.all_reduce(in_world[i], CollectiveKind::kSum, job.call_options()));
      };
      const auto second = [&] {
        started.push_back(pipeline.all_reduce(in_pipeline[i], CollectiveKind::kSum, job.call_options()));
      };
      if (job.rank() == 0) first();
      second();
      if (job.rank() == 1) first();
    }
    while (!started.empty()) {  // the last one first
      started.back()->wait();
      EXPECT_TRUE(started.back()->done());
      started.pop_back();
    }
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(at::equal(in_world[i], at::full({100000}, 2. * i + 1)));
      EXPECT_TRUE(at::equal(in_pipeline[i], at::full({100000}, 4. * i + 1)));
    }
  };
  in_job(2, body, test::with_partitions(2));
}

TEST(Group, WhatDoesNotFitIsAnErrorBeforeAnythingIsStarted) {
  in_job(2, [](JobRank& job) {
    using base::UsageError;
    auto& group = job.group();
    const auto four = at::zeros({4}), three = at::zeros({3}), longs = at::zeros({2}, at::kLong);
    const auto expect = [](const std::function<void()>& call, const std::string& words) {
      test::expect_error<UsageError>(call, words);
    };
    expect([&] { group.all_gather(three, three, job.call_options()); },
           "all_gather over WORLD: a tensor of 3 elements for 2");
    expect([&] { group.reduce_scatter(longs, four, CollectiveKind::kSum, job.call_options()); },
           "reduce_scatter over WORLD");
    expect([&] { group.broadcast(four, 2, job.call_options()); }, "there is no member 2; expected 0 to 1");
    expect([&] { group.all_to_all(three, three, job.call_options()); },
           "3 rows cannot be parted over 2 members equally");
    expect([&] { group.all_to_all(four, four, job.call_options(), {{1, 2}, {2, 2}}); }, "4 rows cannot be parted");
    expect([&] { group.send(four, job.rank(), job.call_options()); }, "send over WORLD: to this rank itself");
    group.barrier(job.call_options())->wait();  // it goes on
  });
}

TEST(Group, EachCollectiveIsAnEventOfTheTimelineFromItsStartUntilItIsDone) {
  in_job(2, [](JobRank& job) {
    auto& group = job.group();
    job.session.start_timeline();
    const auto began = observe::now_ns();
    auto sum = at::ones({1000});
    const auto reduced = group.all_reduce(sum, CollectiveKind::kSum, job.call_options("averaging gradients"));
    auto all = at::empty({20}), mine = at::zeros({10});
    const auto gathered = group.all_gather(all, mine, job.call_options("gathering parameters"));
    gathered->wait();
    reduced->wait();
    const auto ended = observe::now_ns();
    const auto timeline = job.session.recorder().stop();
    std::vector<observe::Event> events;
    for (const auto& event : timeline.ranks.at(0).events) {
      if (event.what == observe::What::kCollective) events.push_back(event);
    }
    ASSERT_EQ(events.size(), 2U);
    EXPECT_EQ(events[0].name, "all_gather WORLD: gathering parameters");
    EXPECT_EQ(events[0].bytes, 80);
    EXPECT_EQ(events[1].name, "all_reduce WORLD: averaging gradients");
    EXPECT_EQ(events[1].bytes, 4000);
    EXPECT_LE(began, events[1].begin_ns);
    EXPECT_LT(events[1].begin_ns, events[0].begin_ns) << "the order in which they were started";
    for (const auto& event : events) {
      EXPECT_LT(event.begin_ns, event.end_ns);
      EXPECT_LE(event.end_ns, ended);
    }
  });
}

}  // namespace
}  // namespace lamina::collective
