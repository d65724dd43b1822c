// SPDX-License-Identifier: Apache-2.0
#include "lamina/shared_memory/neighbours.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <filesystem>
#include <thread>

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
    std::string get(const std::string& key) override {
      return key == "token/0" ? std::string(32, 'f') : inner_.get(key);
    }
    LocalBoard& inner_;
  };
  LocalBoard honest;
  Thief thief(honest);
  const auto whys = why_not(std::chrono::seconds(1),
                            [&](int rank) -> Board& { return rank == 0 ? static_cast<Board&>(honest) : thief; });
  EXPECT_NE(whys[0], "");
  EXPECT_EQ(whys[0], whys[1]);
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
