// SPDX-License-Identifier: Apache-2.0
// Collectives between threads, which are as good as processes here, beside what they are defined to be.
#include "lamina/shared_memory/communicator.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <thread>

#include "tests/shared_memory/members.h"

namespace lamina::shared_memory {
namespace {

using layout::DType;

const std::vector<std::string> none(int members) { return std::vector<std::string>(members); }

// Element `i` of what member `rank` gives.
std::int64_t given(int rank, std::size_t i) { return static_cast<std::int64_t>((i * 7 + 13) % 101) * (rank + 1) - 50; }

std::vector<std::int64_t> given(int rank, std::size_t begin, std::size_t count) {
  std::vector<std::int64_t> elements(count);
  for (std::size_t i = 0; i < count; ++i) elements[i] = given(rank, begin + i);
  return elements;
}

std::int64_t sum_of_given(int members, std::size_t i) {
  std::int64_t sum = 0;
  for (int rank = 0; rank < members; ++rank) sum += given(rank, i);
  return sum;
}

std::vector<Buffer> parts_of(std::vector<std::int64_t>& all, const Communicator& group) {
  return equal_parts(buffer_of(all, DType::kInt64), group.size());
}

std::vector<Buffer> parts_of(std::vector<std::int64_t>& all, const std::vector<std::int64_t>& counts) {
  return parts_of(buffer_of(all, DType::kInt64), std::vector<std::size_t>(counts.begin(), counts.end()));
}

// Sizes around the edges of chunks, and of parts of them.
constexpr std::size_t kCounts[] = {0, 1, 3, 8, 63, 1000, 32767, 32768, 32769, 100003};
constexpr int kMembers[] = {1, 2, 3, 4, 7};

class Collective : public ::testing::TestWithParam<int> {
 protected:
  const int members_ = GetParam();
  void everywhere(const std::function<void(Communicator& group, int rank, std::size_t count)>& work) const {
    const auto ends = together(members_, [&](Communicator& group, int rank) {
      for (const auto count : kCounts) work(group, rank, count);
    });
    EXPECT_EQ(ends, none(members_));
  }
};

TEST_P(Collective, AllReduceGivesTheSumToEveryMember) {
  everywhere([&](Communicator& group, int rank, std::size_t count) {
    auto elements = given(rank, 0, count);
    group.all_reduce(buffer_of(elements, DType::kInt64), Reduction::kSum, kPatient);
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(elements[i], sum_of_given(members_, i));
  });
}

TEST_P(Collective, ReduceGivesItToTheRootAlone) {
  everywhere([&](Communicator& group, int rank, std::size_t count) {
    const int root = static_cast<int>(count) % members_;
    auto elements = given(rank, 0, count);
    group.reduce(buffer_of(elements, DType::kInt64), Reduction::kSum, root, kPatient);
    for (std::size_t i = 0; i < count; ++i) {
      ASSERT_EQ(elements[i], rank == root ? sum_of_given(members_, i) : given(rank, i));
    }
  });
}

TEST_P(Collective, BroadcastGivesEveryMemberWhatTheRootHas) {
  everywhere([&](Communicator& group, int rank, std::size_t count) {
    const int root = static_cast<int>(count) % members_;
    auto elements = given(rank, 0, count);
    group.broadcast(buffer_of(elements, DType::kInt64), root, kPatient);
    ASSERT_EQ(elements, given(root, 0, count));
  });
}

TEST_P(Collective, AllGatherAndGatherPutThePartsOneAfterTheOther) {
  everywhere([&](Communicator& group, int rank, std::size_t count) {
    const int root = static_cast<int>(count) % members_;
    auto mine = given(rank, 0, count);
    std::vector<std::int64_t> all(count * members_), at_root(all);
    group.all_gather(parts_of(all, group), buffer_of(mine, DType::kInt64), kPatient);
    group.gather(parts_of(at_root, group), buffer_of(mine, DType::kInt64), root, kPatient);
    for (int member = 0; member < members_; ++member) {
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(all[member * count + i], given(member, i));
        ASSERT_EQ(at_root[member * count + i], rank == root ? given(member, i) : 0);
      }
    }
  });
}

TEST_P(Collective, AllGatherTakesAPartThatLiesInItsPlace) {
  everywhere([&](Communicator& group, int rank, std::size_t count) {
    std::vector<std::int64_t> all(count * members_);
    const auto mine = given(rank, 0, count);
    std::ranges::copy(mine, all.begin() + static_cast<std::ptrdiff_t>(rank * count));
    const auto parts = parts_of(all, group);
    group.all_gather(parts, parts[rank], kPatient);
    for (int member = 0; member < members_; ++member) {
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(all[member * count + i], given(member, i));
    }
  });
}

TEST_P(Collective, ReduceScatterGivesEachMemberItsPartOfTheSum) {
  everywhere([&](Communicator& group, int rank, std::size_t count) {
    auto all = given(rank, 0, count * members_);
    std::vector<std::int64_t> mine(count);
    group.reduce_scatter(buffer_of(mine, DType::kInt64), parts_of(all, group), Reduction::kSum, kPatient);
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(mine[i], sum_of_given(members_, rank * count + i));
    ASSERT_EQ(all, given(rank, 0, count * members_));
  });
}

TEST_P(Collective, ScatterGivesEachMemberItsPartOfTheRoots) {
  everywhere([&](Communicator& group, int rank, std::size_t count) {
    const int root = static_cast<int>(count) % members_;
    auto all = rank == root ? given(root, 0, count * members_) : std::vector<std::int64_t>();
    std::vector<std::int64_t> mine(count);
    group.scatter(buffer_of(mine, DType::kInt64), parts_of(all, group), root, kPatient);
    ASSERT_EQ(mine, given(root, rank * count, count));
  });
}

// From member i to member j go i + 2 j parts of a count, and none where that is odd and large.
TEST_P(Collective, AllToAllTakesPartsOfAllSizes) {
  everywhere([&](Communicator& group, int rank, std::size_t count) {
    const auto goes = [&](int from, int to) {
      return static_cast<std::int64_t>((from + 2 * to) % 3 == 1 ? 0 : count / 4 * (from + 2 * to + 1));
    };
    std::vector<std::int64_t> sent, received;
    for (int member = 0; member < members_; ++member) {
      sent.push_back(goes(rank, member));
      received.push_back(goes(member, rank));
    }
    auto from = given(rank, 0, std::reduce(sent.begin(), sent.end()));
    std::vector<std::int64_t> to(std::reduce(received.begin(), received.end()), -1);
    group.all_to_all(parts_of(to, received), parts_of(from, sent), kPatient);
    std::size_t at = 0;
    for (int member = 0; member < members_; ++member) {
      std::size_t begin = 0;  // of our part in what that member sends
      for (int before = 0; before < rank; ++before) begin += goes(member, before);
      for (std::int64_t i = 0; i < received[member]; ++i) ASSERT_EQ(to[at++], given(member, begin + i));
    }
  });
}

TEST_P(Collective, ABarrierEndsWhenAllHaveCome) {
  std::atomic<int> come = 0;
  const auto ends = together(members_, [&](Communicator& group, int /*rank*/) {
    for (int round = 1; round <= 200; ++round) {
      ++come;
      group.barrier(kPatient);
      ASSERT_GE(come, round * members_);
    }
  });
  EXPECT_EQ(ends, none(members_));
}

TEST_P(Collective, SendsArriveInOrderBesideCollectives) {
  if (members_ == 1) return;
  everywhere([&](Communicator& group, int rank, std::size_t count) {
    const int next = (rank + 1) % members_, last = (rank + members_ - 1) % members_;
    std::jthread sends([&] {
      for (int i = 0; i < 3; ++i) {
        auto elements = given(rank + i, 0, count);
        group.send(buffer_of(elements, DType::kInt64), next, i, kPatient);
      }
    });
    auto sum = given(rank, 0, count);
    group.all_reduce(buffer_of(sum, DType::kInt64), Reduction::kMax, kPatient);
    for (int i = 0; i < 3; ++i) {
      std::vector<std::int64_t> elements(count);
      group.receive(buffer_of(elements, DType::kInt64), last, i, kPatient);
      ASSERT_EQ(elements, given(last + i, 0, count));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Members, Collective, ::testing::ValuesIn(kMembers),
                         [](const auto& info) { return std::to_string(info.param); });

TEST(Sums, HaveTheSameBitsOnEveryMemberAndInEverySize) {
  std::vector<std::vector<float>> sums(4);
  const auto ends = together(4, [&](Communicator& group, int rank) {
    for (const std::size_t count : {std::size_t{100}, std::size_t{200000}}) {  // either way of making them
      std::mt19937 random(static_cast<unsigned>(rank));
      std::vector<float> elements(count);
      for (auto& element : elements) element = std::normal_distribution<float>(0, 1000)(random);
      group.all_reduce(buffer_of(elements, DType::kFloat32), Reduction::kSum, kPatient);
      elements.resize(100);
      sums[rank].insert(sums[rank].end(), elements.begin(), elements.end());
    }
  });
  ASSERT_EQ(ends, none(4));
  for (const auto& each : sums) {
    EXPECT_EQ(each, sums[0]);
    EXPECT_TRUE(std::equal(each.begin(), each.begin() + 100, each.begin() + 100));
  }
}

}  // namespace
}  // namespace lamina::shared_memory
