// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include <cstdlib>

#include "lamina/base/error.h"
#include "lamina/dist/dist.h"
#include "tests/dist/rank_forks.h"

namespace lamina::dist {
namespace {

using testing::expect_error;
using ::testing::HasSubstr;

at::Tensor number(double value) { return at::full({2}, value); }
double first(const at::Tensor& tensor) { return tensor.flatten()[0].item<double>(); }

void use_every_collective() {
  const int rank = get_global_rank(), size = get_world_size(), last = size - 1;
  barrier();
  at::Tensor tensor = number(rank + 1);
  all_reduce(tensor);
  EXPECT_EQ(first(tensor), size * (size + 1) / 2);
  all_reduce(tensor = number(rank), "max");
  EXPECT_EQ(first(tensor), last);
  at::Tensor strided = at::arange(6, at::kLong).view({2, 3}).t() * (rank + 1);
  all_reduce(strided = strided.t(), "MIN");
  EXPECT_TRUE(at::equal(strided, at::arange(6, at::kLong).view({2, 3})));
  broadcast(tensor = number(rank), last);
  EXPECT_EQ(first(tensor), last);
  const auto gathered = all_gather(at::full({2, 3}, rank).t());
  ASSERT_EQ(gathered.size(), static_cast<std::size_t>(size));
  for (int each = 0; each < size; ++each) EXPECT_TRUE(at::equal(gathered[each], at::full({3, 2}, each)));
}

void pass_objects() {
  const int rank = get_global_rank(), last = get_world_size() - 1;
  const Value mine = value::Dict{{{"rank", std::int64_t(rank)}, {"tensor", at::full({rank + 1}, rank)}}};
  const auto all = all_gather_object(mine);
  ASSERT_EQ(all.size(), static_cast<std::size_t>(last + 1));
  for (int each = 0; each <= last; ++each) {
    const auto& items = all[each].as<value::Dict>().items;
    EXPECT_EQ(items[0].second.as<std::int64_t>(), each);
    EXPECT_TRUE(at::equal(items[1].second.as<at::Tensor>(), at::full({each + 1}, each)));
  }
  std::vector<Value> objects{std::int64_t(rank), std::string(static_cast<std::size_t>(rank), 'x')};
  broadcast_object_list(objects, last);
  EXPECT_EQ(objects[0].as<std::int64_t>(), last);
  EXPECT_EQ(objects[1].as<std::string>(), std::string(static_cast<std::size_t>(last), 'x'));
}

TEST(Collectives, AloneEachRankIsEverybody) {
  testing::alone([] {
    use_every_collective();
    pass_objects();
    initialize_dist();
    use_every_collective();
    pass_objects();
  });
}

TEST(Collectives, ReachAllRanks) {
  for (int size : {1, 2, 3}) testing::in_world(size, use_every_collective);
}

TEST(Collectives, ObjectsOfAnySizePass) {
  for (int size : {2, 3}) testing::in_world(size, pass_objects);
}

TEST(Collectives, AListOfAnotherLengthIsAnErrorAndNobodyHangs) {
  testing::in_world(2, [] {
    std::vector<Value> objects(static_cast<std::size_t>(1 + get_global_rank()));
    if (get_global_rank() == 0) return broadcast_object_list(objects);
    EXPECT_THROW(broadcast_object_list(objects), base::UsageError);
  });
}

TEST(Collectives, WhatIsWrongIsSaidInAnyWorld) {
  const auto check = [] {
    expect_error<base::UsageError>([] { all_reduce(number(1), "mean"); }, "'mean' is not allowed; expected one of SUM");
    expect_error<base::UsageError>([] { broadcast(number(1), 7); }, "rank 7 is none of the");
  };
  testing::alone(check);
  testing::in_world(2, check);
}

TEST(Collectives, SeveralRanksWithoutAGroupAreToldWhatToCall) {
  testing::RankForks ranks(2);
  ranks.start(0, [] {
    std::vector<Value> objects{std::int64_t(1)};
    const std::vector<std::pair<std::string, std::function<void()>>> calls = {
        {"barrier()", [] { barrier(); }},
        {"all_reduce()", [] { all_reduce(number(1)); }},
        {"broadcast()", [] { broadcast(number(1), 0); }},
        {"all_gather()", [] { all_gather(number(1)); }},
        {"all_gather_object()", [] { all_gather_object(Value()); }},
        {"broadcast()", [&] { broadcast_object_list(objects); }},
        {"run_local_rank_zero_first()", [] { run_local_rank_zero_first([] {}); }},
        {"busy_wait_for_local_rank_zero()", [] { busy_wait_for_local_rank_zero([] {}); }}};
    for (const auto& [name, call] : calls) {
      expect_error<base::UsageError>(call, name + ": the world_size(2) > 1");
      expect_error<base::UsageError>(call, "lamina::dist::initialize_dist()");
    }
  });
  ranks.expect_success();
}

// Tests that a launcher starts (see CMakeLists.txt); this process must have no group, because others are forked from
// it.
TEST(Launched, RanksFindEachOther) {
  const auto body = [] {
    initialize_dist("cpu", std::chrono::seconds(60));
    use_every_collective();
    pass_objects();
    barrier();
  };
  if (std::getenv("RANK") == nullptr) return testing::alone(body);
  body();
}

}  // namespace
}  // namespace lamina::dist
