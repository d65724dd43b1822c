// SPDX-License-Identifier: Apache-2.0
// All-reduces of buffers in ordinary memory, which the members read in each other's processes where they may.
#include "lamina/shared_memory/reach.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>
#include <tuple>

#include "lamina/base/error.h"
#include "tests/member_processes.h"
#include "tests/shared_memory/members.h"

namespace lamina::shared_memory {
namespace {

using layout::DType;
using namespace std::chrono_literals;

constexpr std::size_t kBytes = 3 * Reach::kReadBytes;
constexpr std::int64_t kMark = 0x1234567890;

// Bits that a member gives: numbers of a type, some of them not finite.
std::vector<std::byte> given(int rank, std::size_t bytes) {
  std::mt19937 random(static_cast<unsigned>(rank));
  std::vector<std::uint32_t> words(bytes / sizeof(std::uint32_t));
  for (auto& word : words) word = static_cast<std::uint32_t>(random());
  std::vector<std::byte> all(bytes);
  std::memcpy(all.data(), words.data(), bytes);
  return all;
}

bool staged(Communicator& group, std::int64_t number) {
  for (int member = 0; member < group.size(); ++member) {
    const auto* words = reinterpret_cast<const std::int64_t*>(group.together().staging(member));
    const auto count = group.together().chunk_bytes() / sizeof(std::int64_t);
    if (std::find(words, words + count, number) != words + count) return true;
  }
  return false;
}

// True where some staging memory has it, of this operation or the next.
bool staged_anywhere(Communicator& group, std::int64_t number) {
  bool found = false;
  for (int next = 0; next < 2; ++next) {
    found = staged(group, number) || found;
    group.barrier(kPatient);
  }
  return found;
}

void expect_sums(Communicator& group) {
  std::vector<std::int64_t> ones(kBytes / sizeof(std::int64_t), 1);
  group.all_reduce(buffer_of(ones, DType::kInt64), Reduction::kSum, kPatient);
  EXPECT_EQ(std::ranges::count(ones, group.size()), std::ssize(ones));
}

// Runs `work` on members that all read what they may, after an operation in which they learn that.
std::vector<std::string> together_reading(int members, const Work& work) {
  const auto after_learning = [&](Communicator& group, int rank) {
    expect_sums(group);
    work(group, rank);
  };
  return together(members, after_learning, std::vector(members, Reading::kWherePossible));
}

class Sums : public ::testing::TestWithParam<std::tuple<int, Reading>> {};

TEST_P(Sums, HaveTheBitsOfTheReductionInTheOrderOfTheMembers) {
  const auto [members, reading] = GetParam();
  const auto work = [&](Communicator& group, int rank) {
    for (const auto dtype : {DType::kFloat32, DType::kBFloat16, DType::kComplex64}) {
      for (const auto reduction : {Reduction::kSum, Reduction::kMean}) {
        for (const std::size_t odd : {8, 16 * 4099}) {
          const auto bytes = Reach::kReadBytes + odd;
          std::vector<std::vector<std::byte>> all;
          std::vector<const std::byte*> sources;
          for (int member = 0; member < members; ++member) all.push_back(given(member, bytes));
          for (const auto& each : all) sources.push_back(each.data());
          auto own = all[rank];
          // Some lie in the arena, another one on each member.
          const auto arena = (rank + odd) % 3 == 0 ? group.allocate(bytes) : nullptr;
          if (arena) std::memcpy(arena.get(), own.data(), bytes);
          const Buffer buffer{arena ? arena.get() : own.data(), bytes / layout::traits(dtype).size_bytes, dtype};
          group.all_reduce(buffer, reduction, kPatient);
          std::vector<std::byte> expected(bytes);
          reduce(dtype, reduction, expected.data(), sources, buffer.count);
          ASSERT_EQ(std::memcmp(buffer.data, expected.data(), bytes), 0) << layout::traits(dtype).name << ", " << bytes;
        }
      }
    }
  };
  EXPECT_EQ(together(members, work, std::vector(members, reading)), std::vector<std::string>(members));
}

INSTANTIATE_TEST_SUITE_P(Members, Sums,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4),
                                            ::testing::Values(Reading::kWhereFaster, Reading::kWherePossible)),
                         [](const auto& info) {
                           const bool measures = std::get<1>(info.param) == Reading::kWhereFaster;
                           return std::to_string(std::get<0>(info.param)) + (measures ? "Measuring" : "Reading");
                         });

TEST(OrdinaryBuffers, AreNotCopiedToOthersFirst) {
  const auto ends = together_reading(2, [&](Communicator& group, int /*rank*/) {
    std::vector<std::int64_t> marks(kBytes / sizeof kMark, kMark);
    group.all_reduce(buffer_of(marks, DType::kInt64), Reduction::kMax, kPatient);
    group.all_reduce(buffer_of(marks, DType::kInt64), Reduction::kMax, kPatient);
    EXPECT_FALSE(staged_anywhere(group, kMark));
    group.barrier(kPatient);
    group.reduce(buffer_of(marks, DType::kInt64), Reduction::kMax, 0, kPatient);
    EXPECT_TRUE(staged_anywhere(group, kMark)) << "a reduction to one member does";
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
}

TEST(OrdinaryBuffers, MayBeChangedOnceTheirSumsAreThere) {
  const auto ends = together_reading(3, [&](Communicator& group, int rank) {
    std::vector<std::int64_t> sums(kBytes / sizeof(std::int64_t));
    for (std::int64_t round = 1; round < 30; ++round) {
      std::ranges::fill(sums, round);
      group.all_reduce(buffer_of(sums, DType::kInt64), Reduction::kSum, kPatient);
      if (round % 3 == rank) {
        std::ranges::fill(sums, -1);
      } else {
        ASSERT_EQ(std::ranges::count(sums, 3 * round), std::ssize(sums));
      }
    }
  });
  EXPECT_EQ(ends, std::vector<std::string>(3));
}

// A buffer of bytes of which some twelfths, of other members' parts, cannot be read any more.
class Freed {
 public:
  Freed(std::size_t from, std::size_t to)
      : data_(static_cast<std::byte*>(::mmap(nullptr, kBytes, kAll, kFlags, -1, 0))) {
    ::mprotect(data_ + from * kTwelfth, (to - from) * kTwelfth, PROT_NONE);
  }
  Freed(const Freed&) = delete;
  ~Freed() { ::munmap(data_, kBytes); }
  Buffer buffer() const { return {data_, kBytes, DType::kUInt8}; }

 private:
  static constexpr int kAll = PROT_READ | PROT_WRITE, kFlags = MAP_PRIVATE | MAP_ANONYMOUS;
  static constexpr std::size_t kTwelfth = kBytes / 12;  // whole pages
  std::byte* const data_;
};

TEST(OrdinaryBuffers, AreStagedByAllWhereOneNeverReads) {
  const auto work = [&](Communicator& group, int /*rank*/) {
    for (int round = 0; round < 3; ++round) expect_sums(group);
    std::vector<std::int64_t> marks(kBytes / sizeof kMark, kMark);
    group.all_reduce(buffer_of(marks, DType::kInt64), Reduction::kMax, kPatient);
    EXPECT_TRUE(staged_anywhere(group, kMark));
  };
  const auto ends = together(3, work, {Reading::kWherePossible, Reading::kNever, Reading::kWhereFaster});
  EXPECT_EQ(ends, std::vector<std::string>(3));
}

Trial found(double staged, double read, int rounds = Trial::kRounds) { return {rounds, rounds, staged, read}; }

TEST(TheWay, IsTheOneThatTakesAllMembersTheLeastTogether) {
  EXPECT_EQ(way_of(std::array{found(1, 2), found(1, 0.5)}), Way::kStaged);
  EXPECT_EQ(way_of(std::array{found(1, 2), found(3, 1)}), Way::kRead);
}

TEST(TheWay, IsBothUntilAllHaveEnoughRoundsOfEach) {
  EXPECT_EQ(way_of(std::array{found(1, 2), found(1, 2, Trial::kRounds - 1)}), Way::kInTurns);
  auto uneven = found(1, 2);
  uneven.read_rounds = 0;
  EXPECT_EQ(way_of(std::array{uneven, found(1, 2)}), Way::kInTurns);
}

TEST(ATrial, KeepsTheLeastOfTimesForAByte) {
  Trial trial;
  for (const int took : {900, 100, 300}) {
    trial.add_staged(std::chrono::nanoseconds(took), 100);
    trial.add_read(std::chrono::nanoseconds(2 * took), 100);
  }
  EXPECT_EQ(trial.staged, 1);
  EXPECT_EQ(trial.read, 2);
  EXPECT_EQ(trial.staged_rounds, 3);
  EXPECT_EQ(trial.read_rounds, 3);
}

// It has measured one way alone, and the members go on until they have enough of the other.
TEST(OrdinaryBuffers, AreSummedWhereTheyAreLargerThanATrial) {
  const auto ends = together(2, [&](Communicator& group, int rank) {
    std::vector<std::int64_t> sums(48 << 17);  // 48 MiB
    for (int round = 0; round < 3; ++round) {
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<std::int64_t>(i) + rank;
      group.all_reduce(buffer_of(sums, DType::kInt64), Reduction::kSum, kPatient);
      for (std::size_t i = 0; i < sums.size(); ++i) ASSERT_EQ(sums[i], static_cast<std::int64_t>(2 * i + 1));
    }
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
}

TEST(MembersThatSayDifferentThings, AgreeOnAWay) {
  const auto work = [&](Communicator& group, int /*rank*/) {
    for (int round = 0; round < 2 * Trial::kRounds; ++round) expect_sums(group);
  };
  const auto ends = together(3, work, {Reading::kWherePossible, Reading::kWhereFaster, Reading::kWhereFaster});
  EXPECT_EQ(ends, std::vector<std::string>(3));
}

TEST(ATrialThatEndsInAnError, LeavesTheMembersOfOneMind) {
  const auto ends = together(2, [&](Communicator& group, int rank) {
    expect_sums(group);
    for (int round = 0; round < 3; ++round) {
      const Freed freed(10, 12);
      std::vector<std::uint8_t> whole(kBytes);
      const auto buffer = rank == 0 ? freed.buffer() : buffer_of(whole, DType::kUInt8);
      EXPECT_NE(error_of([&] { group.all_reduce(buffer, Reduction::kSum, kPatient); }), "");
      expect_sums(group);
    }
    for (int round = 0; round < 2 * Trial::kRounds; ++round) expect_sums(group);
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
}

TEST(ABufferThatIsFreedInMidRead, EndsTheOperationForAllAndTheGroupGoesOn) {
  std::array<std::string, 2> errors;
  const auto ends = together_reading(2, [&](Communicator& group, int rank) {
    const Freed freed(9, 12);
    std::vector<std::uint8_t> whole(kBytes);
    const auto buffer = rank == 0 ? freed.buffer() : buffer_of(whole, DType::kUInt8);
    errors[rank] = error_of([&] { group.all_reduce(buffer, Reduction::kSum, kPatient); });
    expect_sums(group);
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
  const std::string why =
      "all_reduce of 3145728 uint8, sum, member 0 of 2: its memory could not be read: a tensor is left alone until its "
      "collective has ended";
  EXPECT_EQ(errors[1], "Error: " + why);
  EXPECT_EQ(errors[0], "CancelledError: member 1 of 2 gave up all_reduce of 3145728 uint8, sum: " + why);
}

// A member that gives up may free its buffer at once.
TEST(AMemberThatGivesUpInMidRead, IsNamedByWhoReads) {
  std::array<std::string, 2> errors;
  const auto ends = together_reading(2, [&](Communicator& group, int rank) {
    const Freed freed(9, 12);
    std::vector<std::uint8_t> whole(kBytes);
    const Check check = [&](const std::string& /*awaited*/) {
      if (rank == 0) throw base::TimeoutError("it has no patience");
    };
    const auto buffer = rank == 0 ? freed.buffer() : buffer_of(whole, DType::kUInt8);
    errors[rank] = error_of([&] { group.all_reduce(buffer, Reduction::kSum, check); });
    expect_sums(group);
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
  EXPECT_EQ(errors[1], "CancelledError: member 0 of 2 gave up all_reduce of 3145728 uint8, sum: it has no patience");
}

// Each of its members has a group of its own process, and says how its work ended.
class Members : public MemberProcesses {
 public:
  Members(const std::function<void(int rank)>& before,
          const std::function<void(Communicator& group, int rank, const Say& say)>& work)
      : MemberProcesses([&](const std::string& folder, int rank, const Say& say) {
          say(error_of([&] {
            ::chmod(folder.c_str(), 0777);
            before(rank);
            FileBoard board(folder);
            const auto deadline = base::Deadline::after(30s);
            Neighbours neighbours(board, rank, names(kMembers), deadline);
            if (!neighbours.why_not().empty()) throw base::Error(neighbours.why_not());
            Communicator group(std::move(neighbours), deadline, Reading::kWherePossible);
            work(group, rank, say);
          }));
        }) {}
};

TEST(AMemberKilledInMidRead, IsNamedByEveryOther) {
  const Members members([](int /*rank*/) {},
                        [](Communicator& group, int rank, const auto& say) {
                          expect_sums(group);
                          say("runs");
                          const Freed freed(2, 6);
                          std::vector<std::uint8_t> whole(kBytes);
                          // The first two read what is not there, of the third, when it is killed.
                          const auto turned = rank == 2 ? freed.buffer() : buffer_of(whole, DType::kUInt8);
                          group.all_reduce(turned, Reduction::kSum, kPatient);
                        });
  std::this_thread::sleep_for(100ms);
  members.signal_the_last(SIGKILL);
  for (int rank = 0; rank < 2; ++rank) {
    const auto error = members.hear(rank);
    EXPECT_NE(error.find("member 2 of 3 is lost: its process ended"), std::string::npos) << error;
  }
}

// Gives up what root may do, and the last member what its user may.
void withhold_memory(int rank) {
  constexpr uid_t kNobody = 65534;
  if (::geteuid() == 0 && ::setresuid(kNobody, kNobody, kNobody) != 0) throw base::Error("it stays root");
  ::prctl(PR_SET_DUMPABLE, rank == Members::kLast ? 0 : 1);
}

TEST(AMemberWhoseMemoryNobodyMayRead, HasAllOfThemStageIt) {
  const Members members(withhold_memory, [](Communicator& group, int /*rank*/, const auto& say) {
    say("runs");
    for (int round = 0; round < 3; ++round) expect_sums(group);
    std::vector<std::int64_t> marks(kBytes / sizeof kMark, kMark);
    group.all_reduce(buffer_of(marks, DType::kInt64), Reduction::kMax, kPatient);
    say(staged_anywhere(group, kMark) ? "staged" : "read");
    group.barrier(kPatient);
    if (::testing::Test::HasFailure()) throw base::Error("a wrong sum");
  });
  for (int rank = 0; rank < Members::kMembers; ++rank) {
    EXPECT_EQ(members.hear(rank), "staged");
    EXPECT_EQ(members.hear(rank), "");
  }
}

}  // namespace
}  // namespace lamina::shared_memory
