// SPDX-License-Identifier: Apache-2.0
#include "lamina/rendezvous/switchboard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace lamina::rendezvous {
namespace {

using base::Clock;
using base::Rank;
using std::chrono::milliseconds;
using std::chrono::seconds;

// The switchboards of a job's ranks, in one thread.
class Boards {
 public:
  explicit Boards(int size) : made_(static_cast<std::size_t>(size)) {
    std::vector<Fd> listeners;
    for (int rank = 0; rank < size; ++rank) {
      listeners.push_back(Address::parse("127.0.0.1 0").listen());
      addresses_.push_back(Address::bound_to(listeners.back()).text());
    }
    for (int rank = 0; rank < size; ++rank) {
      contact::Identity self{Rank(rank), size, {}, "g/", std::vector<std::string>(static_cast<std::size_t>(size))};
      for (int peer = 0; peer < size; ++peer) self.told[peer] = std::to_string(rank) + " to " + std::to_string(peer);
      self.secret.fill(7);
      boards_.push_back(std::make_unique<Switchboard>(std::move(self), std::move(listeners[rank]), addresses_));
    }
  }

  Switchboard& operator[](int rank) { return *boards_[rank]; }
  void end(int rank) { boards_[rank].reset(); }
  const std::string& address(int rank) const { return addresses_[rank]; }
  const std::map<Rank, contact::Connection>& made(int rank) const { return made_[rank]; }
  int failures() const { return failures_; }
  int refusals() const { return refusals_; }

  // Goes on until that holds; false after a while in which it did not.
  bool advance(const std::function<bool()>& holds, milliseconds patience = seconds(20)) {
    for (const auto end = Clock::now() + patience; !holds();) {
      if (Clock::now() > end) return false;
      std::vector<pollfd> polled;
      for (const auto& board : boards_) {
        if (board) polled.push_back({board->fd(), POLLIN, 0});
      }
      ::poll(polled.data(), polled.size(), 20);
      for (std::size_t rank = 0; rank < boards_.size(); ++rank) {
        if (!boards_[rank]) continue;
        for (auto& event : boards_[rank]->advance()) {
          if (event.made) {
            EXPECT_TRUE(made_[rank].emplace(event.peer, std::move(*event.made)).second) << "made twice";
          } else {
            ++failures_;
            refusals_ += event.refused ? 1 : 0;
          }
        }
      }
    }
    return true;
  }

 private:
  std::vector<std::string> addresses_;
  std::vector<std::unique_ptr<Switchboard>> boards_;
  std::vector<std::map<Rank, contact::Connection>> made_;
  int failures_ = 0, refusals_ = 0;
};

TEST(Switchboard, EitherOfTwoRanksMayCallAndBothGetOneConnection) {
  for (const int caller : {0, 2}) {
    Boards boards(3);
    boards[caller].call(Rank(2 - caller));
    ASSERT_TRUE(boards.advance([&] { return !boards.made(0).empty() && !boards.made(2).empty(); })) << caller;
    EXPECT_FALSE(boards.advance([&] { return !boards.made(1).empty(); }, milliseconds(300)));
    const contact::Connection &lower = boards.made(0).at(Rank(2)), &higher = boards.made(2).at(Rank(0));
    EXPECT_EQ(lower.outgoing, higher.incoming);
    EXPECT_EQ(lower.incoming, higher.outgoing);
    EXPECT_EQ(lower.told, "2 to 0");
    EXPECT_EQ(higher.told, "0 to 2");
    EXPECT_TRUE(lower.accepted);
    EXPECT_FALSE(higher.accepted);
    EXPECT_EQ(boards.failures(), 0);
  }
}

TEST(Switchboard, AllWhoCallAllGetOneConnectionWithEach) {
  constexpr int kSize = 8;
  Boards boards(kSize);
  for (int rank = 0; rank < kSize; ++rank) {
    for (int peer = 0; peer < kSize; ++peer) {
      if (peer != rank) boards[rank].call(Rank(peer));
    }
  }
  EXPECT_TRUE(boards.advance([&] {
    for (int rank = 0; rank < kSize; ++rank) {
      if (boards.made(rank).size() < kSize - 1) return false;
    }
    return true;
  }));
  EXPECT_FALSE(boards.advance([&] { return boards.failures() > 0; }, milliseconds(300)));
}

TEST(Switchboard, OfARankThatHasEndedItSaysThatNothingListensThere) {
  for (const int caller : {0, 1}) {
    Boards boards(2);
    boards.end(1 - caller);
    boards[caller].call(Rank(1 - caller));
    EXPECT_TRUE(boards.advance([&] { return boards.refusals() >= 2; })) << "it is tried again";
    boards[caller].hang_up(Rank(1 - caller));
    const int refusals = boards.refusals();
    boards.advance([] { return false; }, milliseconds(300));
    EXPECT_LE(boards.refusals(), refusals + 1);
    EXPECT_EQ(boards.refusals(), boards.failures());
  }
}

// Two ranks of the job are connected by it, once.
TEST(Switchboard, AStrangerWhoKnocksInTheNameOfARankGetsNothing) {
  Boards boards(2);
  std::string knock("LAMINA02\0\0\0\0\1\0\0\0", 16);
  knock += std::string(sizeof(contact::Secret), 'n');
  std::vector<Fd> strangers;
  for (int i = 0; i < 10; ++i) {
    Fd stranger = Address::parse(boards.address(1)).begin_connect();
    pollfd ready{stranger.get(), POLLOUT, 0};
    ASSERT_EQ(::poll(&ready, 1, 1000), 1);
    ASSERT_EQ(::send(stranger.get(), knock.data(), knock.size(), MSG_NOSIGNAL), static_cast<ssize_t>(knock.size()));
    strangers.push_back(std::move(stranger));
  }
  ASSERT_TRUE(boards.advance([&] { return boards.made(0).size() + boards.made(1).size() == 2; }));
  boards.advance([] { return false; }, milliseconds(300));
  EXPECT_EQ(boards.made(0).size(), 1);
  for (const Fd& stranger : strangers) {
    char byte;
    EXPECT_LE(::recv(stranger.get(), &byte, 1, 0), 0);
  }
}

}  // namespace
}  // namespace lamina::rendezvous
