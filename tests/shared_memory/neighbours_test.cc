// SPDX-License-Identifier: Apache-2.0
#include "lamina/shared_memory/neighbours.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "tests/shared_memory/members.h"

namespace lamina::shared_memory {
namespace {

std::size_t open_descriptors() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator()));
}

// Two members, of which `board(rank)` is the board, with so much time to meet; why they are no neighbours.
std::vector<std::string> why_not(std::chrono::seconds time, const std::function<Board&(int rank)>& board) {
  std::vector<std::string> whys(2);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back(
        [&, rank] { whys[rank] = Neighbours(board(rank), rank, names(2), base::Deadline::after(time)).why_not(); });
  }
  threads.clear();
  return whys;
}

TEST(Neighbours, AreNoneWhereAMemberIsOnAnotherHost) {
  struct Elsewhere : LocalBoard {
    void put(const std::string& key, const std::string& word) override {
      LocalBoard::put(key, key == "host/1" ? "another host" : word);
    }
  } board;
  const auto whys = why_not(std::chrono::seconds(20), [&](int) -> Board& { return board; });
  EXPECT_EQ(whys[0], "member 0 of 2 and member 1 of 2 are not on one host");
  EXPECT_NE(whys[1], "");
}

TEST(Neighbours, AreNoneWhereAMemberSaysAnotherToken) {
  struct Thief : Board {
    explicit Thief(LocalBoard& inner) : inner_(inner) {}
    void put(const std::string& key, const std::string& word) override { inner_.put(key, word); }
    std::string get(const std::string& key, const std::function<void()>& check) override {
      return key == "token/0" ? std::string(32, 'f') : inner_.get(key, check);
    }
    LocalBoard& inner_;
  };
  LocalBoard honest;
  Thief thief(honest);
  const auto whys = why_not(std::chrono::seconds(20),
                            [&](int rank) -> Board& { return rank == 0 ? static_cast<Board&>(honest) : thief; });
  EXPECT_EQ(whys, std::vector<std::string>(2, "member 1 of 2: member 0 of 2 did not answer"));
}

// One of them fails when it is about to read `key`; it does not say so, as if its process had ended.
void expect_a_loss_is_named(const std::string& key, const std::string& named) {
  struct Ending : Board {
    Ending(LocalBoard& inner, std::string end) : inner_(inner), end_(std::move(end)) {}
    void put(const std::string& key, const std::string& word) override {
      if (key == end_) throw base::Error("the end");
      inner_.put(key, word);
    }
    std::string get(const std::string& key, const std::function<void()>& check) override {
      if (key == end_) throw base::Error("the end");
      return inner_.get(key, check);
    }
    LocalBoard& inner_;
    const std::string end_;
  };
  LocalBoard board;
  Ending ending(board, key);
  std::array<std::string, 3> errors;
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      Board& mine = rank == 1 ? static_cast<Board&>(ending) : board;
      errors[rank] = error_of(
          [&] { const Neighbours all(mine, rank, names(3), base::Deadline::after(std::chrono::seconds(20))); });
    });
  }
  threads.clear();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  EXPECT_EQ(errors[1], "Error: the end");
  EXPECT_EQ(errors[0], named);
  EXPECT_EQ(errors[2], named);
}

TEST(Neighbours, NameAMemberThatEndsBeforeOrAfterItHasConnected) {
  const std::string named = "PeerError: member 1 of 3 is lost: its process ended while the group was made";
  expect_a_loss_is_named("token/2", named);
  expect_a_loss_is_named("vote/1", named);
}

// A board of processes, one of which is told of each word before it is read and after it was written.
struct ToldBoard : FileBoard {
  using FileBoard::FileBoard;
  void put(const std::string& key, const std::string& word) override {
    tell(key);
    FileBoard::put(key, word);
  }
  std::string get(const std::string& key, const std::function<void()>& check) override {
    auto word = FileBoard::get(key, check);
    tell(key);
    return word;
  }
  std::function<void(const std::string& key)> tell = [](const std::string& /*key*/) {};
};

// Runs `work` in three processes, each of which has a board, and returns what they say.
std::vector<std::string> said_by_processes(const std::function<std::string(ToldBoard& board, int rank)>& work) {
  char folder[] = "/tmp/lamina_members_XXXXXX";
  EXPECT_NE(::mkdtemp(folder), nullptr);
  std::vector<std::string> said(3);
  std::vector<std::pair<pid_t, base::Fd>> processes;
  for (int rank = 0; rank < 3; ++rank) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
      ToldBoard board(folder);
      const auto text = work(board, rank);
      ::_exit(::write(ends[1], text.data(), text.size()) == std::ssize(text) ? 0 : 1);
    }
    ::close(ends[1]);
    processes.emplace_back(pid, ends[0]);
  }
  for (int rank = 0; rank < 3; ++rank) {
    const auto& [pid, out] = processes[rank];
    for (char letter = 0; ::read(out.get(), &letter, 1) == 1;) said[rank] += letter;
    ::waitpid(pid, nullptr, 0);
  }
  std::filesystem::remove_all(folder);
  return said;
}

// So many descriptors may be opened from here on; a negative number lifts the limit.
void allow_descriptors(int count) {
  const int next = ::dup(STDERR_FILENO);
  ::close(next);
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = count < 0 ? limit.rlim_max : static_cast<rlim_t>(next + count);
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

const std::string kOut = "Too many open files (`ulimit -n` raises the limit)";

TEST(DescriptorsThatRunOut, AreTheReasonWhyThereAreNoNeighbours) {
  const auto whys = [](const std::string& from, const std::string& to, int count) {
    return said_by_processes([&](ToldBoard& board, int rank) {
      if (rank == 0) {
        if (from.empty()) allow_descriptors(count);
        board.tell = [&](const std::string& key) {
          if (key == from) allow_descriptors(count);
          if (key == to) allow_descriptors(-1);
        };
      }
      std::string why;
      const auto error = error_of(
          [&] { why = Neighbours(board, rank, names(3), base::Deadline::after(std::chrono::seconds(20))).why_not(); });
      return error + why;
    });
  };
  EXPECT_EQ(whys("", "host/0", 0), std::vector<std::string>(3, "member 0 of 3: cannot make a socket: " + kOut));
  EXPECT_EQ(whys("", "host/0", 1),
            std::vector<std::string>(3, "member 0 of 3: cannot read /proc/sys/kernel/random/boot_id: " + kOut));
  EXPECT_EQ(whys("token/2", "vote/0", 1),
            std::vector<std::string>(3, "member 0 of 3: cannot accept another member: " + kOut));
}

TEST(DescriptorsThatRunOut, AreTheErrorOfAllThatShareMemory) {
  for (const int count : {0, 2}) {
    const auto errors = said_by_processes([&](ToldBoard& board, int rank) {
      const auto deadline = base::Deadline::after(std::chrono::seconds(20));
      const Neighbours neighbours(board, rank, names(3), deadline);
      if (rank == 0) allow_descriptors(count);
      auto error = error_of([&] { neighbours.share(4096, deadline); });
      if (rank == 0) allow_descriptors(-1);
      return error + error_of([&] { neighbours.share(4096, deadline); });
    });
    const auto* doing = count == 0 ? "Error: cannot make shared memory of " : "Error: cannot take shared memory of ";
    EXPECT_TRUE(errors[0].starts_with(doing) && errors[0].ends_with(kOut)) << errors[0];
    for (int rank = 1; rank < 3; ++rank) {
      EXPECT_EQ(errors[rank], count == 0 ? "Error: member 0 of 3 could not make its shared memory: see its own error"
                                         : "Error: member 0 of 3 could not share memory: see its own error");
    }
  }
}

// Connects to a member before its neighbour does, and says nothing.
TEST(Neighbours, MeetThoughAStrangerConnectsAndIsSilent) {
  LocalBoard board;
  std::jthread first([&] {
    EXPECT_EQ(Neighbours(board, 0, names(2), base::Deadline::after(std::chrono::seconds(20))).why_not(), "");
  });
  const auto name = board.get("address/0");
  const base::Fd stranger(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  ASSERT_EQ(::connect(stranger.get(), reinterpret_cast<const sockaddr*>(&address),
                      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())),
            0);
  EXPECT_EQ(Neighbours(board, 1, names(2), base::Deadline::after(std::chrono::seconds(20))).why_not(), "");
}

TEST(Neighbours, LeaveNothingBehind) {
  EXPECT_EQ(together(3, [](Communicator& group, int) { group.barrier(kPatient); }), std::vector<std::string>(3));
  const auto before = open_descriptors();
  EXPECT_EQ(together(3, [](Communicator& group, int) { group.barrier(kPatient); }), std::vector<std::string>(3));
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace lamina::shared_memory
