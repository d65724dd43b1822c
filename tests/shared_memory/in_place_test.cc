// SPDX-License-Identifier: Apache-2.0
// Buffers that lie in members' arenas: collectives of them are those of other buffers, without copies in between.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <random>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/shared_memory/communicator.h"
#include "tests/shared_memory/members.h"

namespace lamina::shared_memory {
namespace {

using layout::DType;
using Numbers = std::vector<std::int64_t>;

// Elements in an arena, some of them behind its beginning, or in memory of this process.
class Elements {
 public:
  Elements(Communicator& group, const Numbers& numbers, bool in_arena, std::size_t behind = 0) : own_(numbers) {
    buffer_ = buffer_of(own_, DType::kInt64);
    if (!in_arena) return;
    memory_ = group.allocate((behind + numbers.size()) * sizeof(std::int64_t));
    if (!memory_) throw base::Error("the arena has no room");
    buffer_.data = memory_.get() + behind * sizeof(std::int64_t);
    std::memcpy(buffer_.data, own_.data(), numbers.size() * sizeof(std::int64_t));
  }
  Elements(const Elements&) = delete;
  // Overwrites them, as a program may once its collective has ended.
  ~Elements() { std::memset(buffer_.data, 0x55, buffer_.count * sizeof(std::int64_t)); }

  const Buffer& buffer() const { return buffer_; }
  Numbers numbers() const {
    const auto* first = reinterpret_cast<const std::int64_t*>(buffer_.data);
    return {first, first + buffer_.count};
  }

 private:
  Numbers own_;
  std::shared_ptr<std::byte> memory_;
  Buffer buffer_;
};

Numbers given(int rank, std::size_t begin, std::size_t count) {
  Numbers numbers(count);
  for (std::size_t i = 0; i < count; ++i) numbers[i] = static_cast<std::int64_t>((begin + i) * 7 % 101) * (rank + 1);
  return numbers;
}

Numbers sum_of_given(int members, std::size_t begin, std::size_t count) {
  Numbers sum(count);
  for (int rank = 0; rank < members; ++rank) {
    const auto one = given(rank, begin, count);
    for (std::size_t i = 0; i < count; ++i) sum[i] += one[i];
  }
  return sum;
}

// Around the size from which buffers are read in place, and of several chunks.
constexpr std::array<std::size_t, 4> kCounts{100, 32767, 32768, 100001};

class InPlace : public ::testing::TestWithParam<int> {
 protected:
  const int members_ = GetParam();
  // Calls `work` on every member; `random` draws what it does as it likes, such as where its buffers lie.
  void everywhere(
      const std::function<void(Communicator& group, int rank, std::size_t count, std::mt19937& random)>& work) const {
    const auto ends = together(members_, [&](Communicator& group, int rank) {
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int round = 0; round < 2; ++round) {
        for (const auto count : kCounts) work(group, rank, count, random);
      }
    });
    EXPECT_EQ(ends, std::vector<std::string>(members_));
  }
};

bool often(std::mt19937& random) { return random() % 4 != 0; }

TEST_P(InPlace, AllReduceAndReduce) {
  everywhere([&](Communicator& group, int rank, std::size_t count, std::mt19937& random) {
    const Elements all(group, given(rank, 0, count), often(random), random() % 9);
    group.all_reduce(all.buffer(), Reduction::kSum, kPatient);
    ASSERT_EQ(all.numbers(), sum_of_given(members_, 0, count));
    const int root = static_cast<int>(count) % members_;
    const Elements one(group, given(rank, 0, count), often(random));
    group.reduce(one.buffer(), Reduction::kSum, root, kPatient);
    ASSERT_EQ(one.numbers(), rank == root ? sum_of_given(members_, 0, count) : given(rank, 0, count));
  });
}

TEST_P(InPlace, Broadcast) {
  everywhere([&](Communicator& group, int rank, std::size_t count, std::mt19937& random) {
    const int root = static_cast<int>(count) % members_;
    const Elements elements(group, given(rank, 0, count), often(random), random() % 9);
    group.broadcast(elements.buffer(), root, kPatient);
    ASSERT_EQ(elements.numbers(), given(root, 0, count));
  });
}

TEST_P(InPlace, AllGatherAndGather) {
  everywhere([&](Communicator& group, int rank, std::size_t count, std::mt19937& random) {
    Numbers expected;
    for (int member = 0; member < members_; ++member) {
      const auto one = given(member, 0, count);
      expected.insert(expected.end(), one.begin(), one.end());
    }
    const Elements mine(group, given(rank, 0, count), often(random), random() % 9);
    const Elements all(group, Numbers(count * members_), often(random)),
        root(group, Numbers(count * members_), often(random));
    group.all_gather(equal_parts(all.buffer(), members_), mine.buffer(), kPatient);
    ASSERT_EQ(all.numbers(), expected);
    group.gather(equal_parts(root.buffer(), members_), mine.buffer(), 1, kPatient);
    ASSERT_EQ(root.numbers(), rank == 1 ? expected : Numbers(count * members_));
    ASSERT_EQ(mine.numbers(), given(rank, 0, count));
  });
}

TEST_P(InPlace, AllGatherOfAPartInItsPlace) {
  everywhere([&](Communicator& group, int rank, std::size_t count, std::mt19937& random) {
    const Elements all(group, Numbers(count * members_), often(random));
    const auto parts = equal_parts(all.buffer(), members_);
    const auto mine = given(rank, 0, count);
    std::memcpy(parts[rank].data, mine.data(), count * sizeof(std::int64_t));
    group.all_gather(parts, parts[rank], kPatient);
    for (int member = 0; member < members_; ++member) {
      const auto one = given(member, 0, count);
      ASSERT_EQ(std::memcmp(parts[member].data, one.data(), count * sizeof(std::int64_t)), 0);
    }
  });
}

// Its result may lie in the parts, in any place: those that it overwrites are not read in place.
TEST_P(InPlace, ReduceScatter) {
  everywhere([&](Communicator& group, int rank, std::size_t count, std::mt19937& random) {
    const Elements all(group, given(rank, 0, count * members_), often(random), random() % 9);
    const auto parts = equal_parts(all.buffer(), members_);
    const Elements own(group, Numbers(count), often(random));
    group.reduce_scatter(own.buffer(), parts, Reduction::kSum, kPatient);
    ASSERT_EQ(own.numbers(), sum_of_given(members_, rank * count, count));
    ASSERT_EQ(all.numbers(), given(rank, 0, count * members_));
    group.reduce_scatter(parts[rank], parts, Reduction::kSum, kPatient);
    ASSERT_EQ(std::memcmp(parts[rank].data, own.buffer().data, count * sizeof(std::int64_t)), 0);
  });
}

TEST_P(InPlace, AResultThatOverwritesAPartOfAnotherMember) {
  everywhere([&](Communicator& group, int rank, std::size_t count, std::mt19937& random) {
    const int other = (rank + 1) % members_;
    const Elements all(group, given(rank, 0, count * members_), often(random));
    const auto parts = equal_parts(all.buffer(), members_);
    group.reduce_scatter(parts[other], parts, Reduction::kSum, kPatient);
    const auto sum = sum_of_given(members_, rank * count, count);
    ASSERT_EQ(std::memcmp(parts[other].data, sum.data(), count * sizeof(std::int64_t)), 0);
    // Each gives what lies where it gets another one's.
    group.all_gather(parts, parts[other], kPatient);
    for (int member = 0; member < members_; ++member) {
      const auto one = sum_of_given(members_, member * count, count);
      ASSERT_EQ(std::memcmp(parts[member].data, one.data(), count * sizeof(std::int64_t)), 0);
    }
  });
}

TEST_P(InPlace, SeveralBuffersInOneOperation) {
  everywhere([&](Communicator& group, int rank, std::size_t count, std::mt19937& random) {
    const Elements one(group, given(rank, 0, count), often(random)), two(group, given(rank, 5, 40000), often(random)),
        three(group, given(rank, 9, 10), often(random));
    const std::array buffers{one.buffer(), two.buffer(), three.buffer(), one.buffer()};
    group.all_reduce(buffers, Reduction::kSum, kPatient);
    auto twice = sum_of_given(members_, 0, count);
    for (auto& number : twice) number *= members_;
    ASSERT_EQ(one.numbers(), twice);
    ASSERT_EQ(two.numbers(), sum_of_given(members_, 5, 40000));
    ASSERT_EQ(three.numbers(), sum_of_given(members_, 9, 10));
    const Elements all(group, Numbers(3 * members_ * 40000), often(random));
    const auto thirds = equal_parts(all.buffer(), 3);
    std::vector<Divided> divided;
    for (const auto& third : thirds) divided.push_back({two.buffer(), equal_parts(third, members_)});
    group.all_gather(divided, kPatient);
    const auto sum = sum_of_given(members_, 5, 40000);
    for (const auto& part : equal_parts(all.buffer(), 3 * members_)) {
      ASSERT_EQ(std::memcmp(part.data, sum.data(), sum.size() * sizeof(std::int64_t)), 0);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Members, InPlace, ::testing::Values(2, 3, 4),
                         [](const auto& info) { return std::to_string(info.param); });

// True where some staging memory of any member, of this operation or the next, has the number.
bool staged_anywhere(Communicator& group, std::int64_t number) {
  bool found = false;
  for (int next = 0; next < 2; ++next) {
    for (int member = 0; member < group.size(); ++member) {
      const auto* words = reinterpret_cast<const std::int64_t*>(group.together().staging(member));
      const auto count = group.together().chunk_bytes() / sizeof(std::int64_t);
      found = found || std::find(words, words + count, number) != words + count;
    }
    group.barrier(kPatient);
  }
  return found;
}

TEST(BuffersInArenas, AreNotCopiedToOthersFirst) {
  const auto ends = together(2, [&](Communicator& group, int /*rank*/) {
    constexpr std::int64_t kMark = 0x1234567890;
    constexpr std::size_t kCount = 100000;
    const Elements mine(group, Numbers(kCount, kMark), true), all(group, Numbers(2 * kCount, kMark), false),
        in_arena(group, Numbers(2 * kCount, kMark), true);
    group.barrier(kPatient);
    group.broadcast(mine.buffer(), 0, kPatient);
    group.all_gather(equal_parts(all.buffer(), 2), mine.buffer(), kPatient);
    group.reduce_scatter(mine.buffer(), equal_parts(in_arena.buffer(), 2), Reduction::kMax, kPatient);
    EXPECT_FALSE(staged_anywhere(group, kMark));
    group.barrier(kPatient);
    group.all_gather(equal_parts(in_arena.buffer(), 2), parts_of(all.buffer(), std::array{kCount}).front(), kPatient);
    EXPECT_TRUE(staged_anywhere(group, kMark));
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
}

// A member that has gone on may change what it gave: the others have it.
TEST(BuffersInArenas, MayBeChangedOnceTheOperationHasEnded) {
  const auto ends = together(3, [&](Communicator& group, int rank) {
    constexpr std::size_t kCount = 40000;
    const Elements mine(group, Numbers(kCount), true), all(group, Numbers(3 * kCount), rank != 1);
    for (std::int64_t round = 1; round < 50; ++round) {
      std::fill_n(reinterpret_cast<std::int64_t*>(mine.buffer().data), kCount, round * 10 + rank);
      group.all_gather(equal_parts(all.buffer(), 3), mine.buffer(), kPatient);
      std::fill_n(reinterpret_cast<std::int64_t*>(mine.buffer().data), kCount, -1);
      const auto numbers = all.numbers();
      for (int member = 0; member < 3; ++member) {
        ASSERT_EQ(std::count(numbers.begin() + static_cast<std::ptrdiff_t>(member * kCount),
                             numbers.begin() + static_cast<std::ptrdiff_t>((member + 1) * kCount), round * 10 + member),
                  std::ptrdiff_t{kCount});
      }
    }
  });
  EXPECT_EQ(ends, std::vector<std::string>(3));
}

TEST(BuffersInArenas, MayBeChangedOnceTheirSumsAreThere) {
  const auto ends = together(3, [&](Communicator& group, int rank) {
    constexpr std::size_t kCount = 200000;
    const Elements sums(group, Numbers(kCount), true);
    auto* first = reinterpret_cast<std::int64_t*>(sums.buffer().data);
    for (std::int64_t round = 1; round < 50; ++round) {
      std::fill_n(first, kCount, round);
      group.all_reduce(sums.buffer(), Reduction::kSum, kPatient);
      if (round % 3 == rank) {
        std::memset(first, -1, kCount * sizeof(std::int64_t));
      } else {
        ASSERT_EQ(std::count(first, first + kCount, 3 * round), std::ptrdiff_t{kCount});
      }
    }
  });
  EXPECT_EQ(ends, std::vector<std::string>(3));
}

TEST(BuffersInArenas, OutliveTheirGroup) {
  std::array<std::shared_ptr<std::byte>, 2> kept;
  const auto ends = together(2, [&](Communicator& group, int rank) {
    kept[rank] = group.allocate(1 << 20);
    std::memset(kept[rank].get(), rank + 1, 1 << 20);
    group.barrier(kPatient);
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
  // In a group that is not theirs, they are as others.
  const auto again = together(2, [&](Communicator& group, int rank) {
    const Buffer bytes{kept[rank].get(), 1 << 20, DType::kUInt8};
    group.all_reduce(bytes, Reduction::kSum, kPatient);
    EXPECT_EQ(std::count(bytes.data, bytes.at(bytes.count), std::byte{3}), 1 << 20);
  });
  EXPECT_EQ(again, std::vector<std::string>(2));
}

TEST(BuffersInArenas, AreOfferedUntilThereIsNoRoom) {
  const auto ends = together(2, [&](Communicator& group, int /*rank*/) {
    std::vector<std::shared_ptr<std::byte>> pieces;
    while (auto piece = group.allocate(std::size_t{1} << 30)) pieces.push_back(std::move(piece));
    EXPECT_GE(pieces.size(), 16U);
    pieces.pop_back();
    EXPECT_NE(group.allocate(std::size_t{1} << 30), nullptr);
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
}

// A child's exit status says what it found.
TEST(BuffersInArenas, AreNotOfferedWhereAMemberMayNotHaveAsMuchAddressSpace) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlim_t most = pages * 4096 + (std::size_t{8} << 30);
    const rlimit limit{most, most};
    const bool right = ::setrlimit(RLIMIT_AS, &limit) == 0;
    const auto ends = together(2, [&](Communicator& group, int rank) {
      Numbers numbers(100000, rank + 1);
      group.all_reduce(buffer_of(numbers, DType::kInt64), Reduction::kSum, kPatient);
      if (group.allocate(1) != nullptr || numbers != Numbers(100000, 3)) throw base::Error("wrong");
    });
    ::_exit(right && ends == std::vector<std::string>(2) ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace lamina::shared_memory
