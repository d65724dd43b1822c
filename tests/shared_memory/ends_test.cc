// SPDX-License-Identifier: Apache-2.0
// Operations that do not come to their end: one that a member gives up, a member whose process ends or is frozen.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <memory>
#include <optional>
#include <set>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/shared_memory/communicator.h"
#include "tests/member_processes.h"
#include "tests/shared_memory/members.h"

namespace lamina::shared_memory {
namespace {

using layout::DType;
using Clock = std::chrono::steady_clock;

// Members that wait for each other in this process, once.
class Latches {
 public:
  void open(int number) {
    std::lock_guard guard(mutex_);
    open_.insert(number);
    changed_.notify_all();
  }
  void wait(int number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_.contains(number); });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<int> open_;
};

// Member 1 gives up at its first wait; member 3 comes when that has happened.
TEST(GivingUp, EndsTheOperationForAllAndTheGroupGoesOn) {
  constexpr int kMembers = 4, kRounds = 3;
  std::array<std::array<std::string, kRounds>, kMembers> errors;
  Latches given_up;
  const auto ends = together(kMembers, [&](Communicator& group, int rank) {
    std::vector<std::int64_t> elements(100000, 1);
    const auto buffer = buffer_of(elements, DType::kInt64);
    const Check check = [&](const std::string& /*awaited*/) {
      if (rank == 1) throw base::Error("it has no patience");
    };
    for (int round = 0; round < kRounds; ++round) {
      if (rank == 3) given_up.wait(round);
      errors[rank][round] = error_of([&] { group.all_reduce(buffer, Reduction::kSum, check); });
      if (rank == 1) given_up.open(round);
      std::ranges::fill(elements, rank + 1);
      group.all_reduce(buffer, Reduction::kSum, kPatient);
      EXPECT_EQ(elements, std::vector<std::int64_t>(elements.size(), 10));
    }
  });
  EXPECT_EQ(ends, std::vector<std::string>(kMembers));
  for (int rank = 0; rank < kMembers; ++rank) {
    for (const auto& error : errors[rank]) {
      EXPECT_EQ(error,
                rank == 1
                    ? "Error: it has no patience"
                    : "CancelledError: member 1 of 4 gave up all_reduce of 100000 int64, sum: it has no patience");
    }
  }
}

// Member 0 ends the first operation and gives many more up while member 1 is still in it.
TEST(GivingUp, AtOnceEndsNoOperationBeforeOnASlowerMember) {
  constexpr int kGivenUp = 100;
  Latches latches;
  enum : int { kWaits, kGaveUp };
  std::array<std::vector<std::string>, 3> errors;
  const auto ends = together(3, [&](Communicator& group, int rank) {
    const Check check = [&](const std::string& /*awaited*/) {
      if (rank != 1) return;
      latches.open(kWaits);
      latches.wait(kGaveUp);
    };
    if (rank == 2) latches.wait(kWaits);
    group.barrier(check);
    for (int number = 0; number < kGivenUp; ++number) {
      if (rank == 0) {
        group.together().leave_out(base::str("number ", number), "it has no time");
      } else {
        if (number == 0) latches.wait(kGaveUp);
        errors[rank].push_back(error_of([&] { group.barrier(kPatient); }));
      }
    }
    latches.open(kGaveUp);
    group.barrier(kPatient);
  });
  EXPECT_EQ(ends, std::vector<std::string>(3));
  for (int rank = 1; rank < 3; ++rank) {
    ASSERT_EQ(errors[rank].size(), kGivenUp);
    EXPECT_EQ(errors[rank][0], "CancelledError: member 0 of 3 gave up number 0: it has no time");
    for (const auto& error : errors[rank]) EXPECT_EQ(error.find("CancelledError: member 0 of 3 gave up "), 0U) << error;
  }
}

// A child's exit status says what it found.
TEST(AForkedChild, MayNotCallAndChangesNothingByItsEnd) {
  const auto ends = together(2, [&](Communicator& group, int rank) {
    group.barrier(kPatient);
    if (rank == 0) {
      const pid_t child = ::fork();
      if (child == 0) {
        const auto error = error_of([&] { group.barrier(kPatient); });
        std::destroy_at(&group);
        ::_exit(error == "Error: barrier in a child of fork(): the group is its parent's; make one of its own" ? 0 : 1);
      }
      int status = -1;
      EXPECT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
    }
    for (int round = 0; round < 5; ++round) {
      std::vector<std::int64_t> elements(1000, rank + 1);
      group.all_reduce(buffer_of(elements, DType::kInt64), Reduction::kSum, kPatient);
      EXPECT_EQ(elements, std::vector<std::int64_t>(1000, 3));
    }
    // Says that it ends, and not that its child did.
    if (rank == 0) return;
    const auto error = error_of([&] { group.barrier(kPatient); });
    EXPECT_NE(error.find("member 0 of 2 has closed the group"), std::string::npos) << error;
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
}

// A descriptor that a child opens may have the number of one of the group's, which it has closed.
TEST(AForkedChild, KeepsItsDescriptorsWhenItsCopyOfTheGroupEnds) {
  const auto ends = together(2, [&](Communicator& group, int rank) {
    group.barrier(kPatient);
    if (rank == 1) return group.barrier(kPatient);
    const pid_t child = ::fork();
    if (child == 0) {
      std::array<int, 64> own{};
      for (auto& fd : own) fd = ::dup(STDERR_FILENO);
      std::destroy_at(&group);
      ::_exit(std::ranges::all_of(own, [](int fd) { return ::fcntl(fd, F_GETFD) != -1; }) ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    group.barrier(kPatient);
  });
  EXPECT_EQ(ends, std::vector<std::string>(2));
}

// A collective as a member calls it over and over.
using Collective = std::function<void(Communicator& group, Buffer all, Buffer mine, const Check& check)>;
struct Named {
  const char* name;
  Collective call;
};

const std::vector<Named>& collectives() {
  static const std::vector<Named> kAll{
      {"all_reduce",
       [](auto& group, auto, auto mine, const auto& check) { group.all_reduce(mine, Reduction::kSum, check); }},
      {"all_reduce of memory that others read",
       [](auto& group, auto all, auto, const auto& check) { group.all_reduce(all, Reduction::kSum, check); }},
      {"reduce",
       [](auto& group, auto, auto mine, const auto& check) { group.reduce(mine, Reduction::kSum, 0, check); }},
      {"broadcast", [](auto& group, auto, auto mine, const auto& check) { group.broadcast(mine, 0, check); }},
      {"all_gather",
       [](auto& group, auto all, auto mine, const auto& check) { group.all_gather(equal_parts(all, 3), mine, check); }},
      {"reduce_scatter",
       [](auto& group, auto all, auto mine, const auto& check) {
         group.reduce_scatter(mine, equal_parts(all, 3), Reduction::kSum, check);
       }},
      {"gather",
       [](auto& group, auto all, auto mine, const auto& check) { group.gather(equal_parts(all, 3), mine, 0, check); }},
      {"scatter",
       [](auto& group, auto all, auto mine, const auto& check) { group.scatter(mine, equal_parts(all, 3), 0, check); }},
      {"all_to_all",
       [](auto& group, auto all, auto, const auto& check) {
         std::vector<std::byte> sent(all.count * all.element_bytes());
         group.all_to_all(equal_parts(all, 3), equal_parts({sent.data(), all.count, all.dtype}, 3), check);
       }},
      {"barrier", [](auto& group, auto, auto, const auto& check) { group.barrier(check); }},
  };
  return kAll;
}

// Members that run one collective over and over.
class Processes : public MemberProcesses {
 public:
  explicit Processes(const Named& collective)
      : MemberProcesses([&](const std::string& folder, int rank, const Say& say) {
          say(error_of([&] {
            FileBoard board(folder);
            const auto deadline = base::Deadline::after(std::chrono::seconds(30));
            Neighbours neighbours(board, rank, names(kMembers), deadline);
            if (!neighbours.why_not().empty()) throw base::Error(neighbours.why_not());
            Communicator group(std::move(neighbours), deadline);
            std::vector<float> all(300000), mine(100000);
            std::optional<Clock::time_point> waits_since;
            const Check check = [&](const std::string& awaited) {
              if (!waits_since) waits_since = Clock::now();
              if (Clock::now() - *waits_since < std::chrono::milliseconds(1500)) return;
              throw base::TimeoutError(base::str("no patience with ", awaited));
            };
            for (int round = 0;; ++round) {
              waits_since.reset();
              collective.call(group, buffer_of(all, DType::kFloat32), buffer_of(mine, DType::kFloat32), check);
              if (round == 20) say("runs");
            }
          }));
        }) {}
};

TEST(AKilledMember, IsNamedByEveryOtherInEachCollectiveWithin2s) {
  for (const auto& collective : collectives()) {
    const Processes processes(collective);
    const auto killed = Clock::now();
    processes.signal_the_last(SIGKILL);
    for (int rank = 0; rank < 2; ++rank) {
      const auto error = processes.hear(rank);
      EXPECT_LT(Clock::now() - killed, std::chrono::seconds(2)) << collective.name;
      EXPECT_NE(error.find("member 2 of 3 is lost: its process ended"), std::string::npos) << collective.name << error;
    }
  }
}

// Some at a time, as each takes the others' patience.
TEST(AFrozenMember, EndsTheCollectiveByTheChecksOfTheOthers) {
  const auto& all = collectives();
  for (std::size_t begin = 0; begin < all.size(); begin += 3) {
    std::vector<std::unique_ptr<Processes>> jobs;
    for (std::size_t i = begin; i < std::min(begin + 3, all.size()); ++i) {
      jobs.push_back(std::make_unique<Processes>(all[i]));
      jobs.back()->signal_the_last(SIGSTOP);
    }
    for (const auto& job : jobs) {
      for (int rank = 0; rank < 2; ++rank) {
        const auto error = job->hear(rank);
        EXPECT_NE(error.find("no patience with member 2 of 3"), std::string::npos) << error;
      }
      job->signal_the_last(SIGCONT);
      const auto error = job->hear(2);
      EXPECT_NE(error.find("gave up"), std::string::npos) << error;
    }
  }
}

}  // namespace
}  // namespace lamina::shared_memory
