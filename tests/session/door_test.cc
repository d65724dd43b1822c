// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/door.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <cstdlib>

#include "lamina/base/error.h"
#include "lamina/data_parallel/newcomers.h"
#include "lamina/environment/address.h"
#include "lamina/environment/rank_contract.h"
#include "lamina/session/newcomer.h"

namespace lamina::session {
namespace {

using namespace std::chrono_literals;
using contact::Handshake;
using contact::Identity;
using contact::Secret;

const Facts kFacts{{"version of torch", "2.0"}, {"model", "a float32 (2, 3)\nb float32 (3,)"}};

std::string shares_out_12(int ranks) {
  return 12 % ranks == 0 ? "" : std::to_string(ranks) + " ranks cannot share out 12";
}

template <class Condition>
bool eventually(const Condition& condition) {
  for (const auto by = base::Deadline::after(20s); !by.expired(); std::this_thread::sleep_for(5ms)) {
    if (condition()) return true;
  }
  return false;
}

TEST(DoorTerms, LetInAsManyAsFit) {
  const DoorTerms terms{.ranks = 2, .most = 6, .why_not = shares_out_12};
  EXPECT_EQ(terms.fitting(0), 0);
  EXPECT_EQ(terms.fitting(1), 1);
  EXPECT_EQ(terms.fitting(3), 2) << "5 do not";
  EXPECT_EQ(terms.fitting(9), 4) << "and no more than 6";
  EXPECT_EQ((DoorTerms{.ranks = 4, .most = 5, .why_not = shares_out_12}.fitting(3)), 0);
  EXPECT_EQ((DoorTerms{.ranks = 4, .most = 5}.fitting(3)), 1) << "any number";
  EXPECT_EQ((DoorTerms{.ranks = 4, .most = 4}.fitting(3)), 0);
  EXPECT_EQ((DoorTerms{.ranks = 4, .most = 0}.fitting(3)), 0);
}

TEST(Facts, TravelAndDifferByName) {
  EXPECT_EQ(to_facts(to_bytes(kFacts)), kFacts);
  EXPECT_EQ(difference(kFacts, kFacts), "");
  auto other = kFacts;
  other[1].second = "a float32 (2, 3)\nb float64 (3,)";
  EXPECT_EQ(difference(kFacts, other), "its model is another one: b float64 (3,); the job has b float32 (3,)");
  other[1].second = "a float32 (2, 3)";
  EXPECT_EQ(difference(kFacts, other), "its model is another one: nothing more; the job has b float32 (3,)");
  other.pop_back();
  EXPECT_NE(difference(kFacts, other), "");
  EXPECT_NE(difference(other, kFacts), "");
  const auto bytes = to_bytes(kFacts);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(to_facts(bytes.substr(0, size)), base::FormatError) << size;
  }
}

TEST(Facts, ANewcomerTellsItsMachineAndHowManyComeBesides) {
  auto facts = of_guest({.node = 2, .together = 3}, kFacts);
  EXPECT_NE(difference(kFacts, facts), "");
  const auto entrant = take_entrant(facts);
  EXPECT_EQ(entrant.node, 2);
  EXPECT_EQ(entrant.together, 3);
  EXPECT_EQ(facts, kFacts);
  EXPECT_THROW(take_entrant(facts), base::FormatError) << "it tells none";
  auto odd = of_guest({}, kFacts);
  odd.back().second = "first";
  EXPECT_THROW(take_entrant(odd), base::FormatError);
}

TEST(LocalPlace, CountsThoseOfTheSameMachine) {
  const std::vector<int> nodes{1, 0, 0, 1, 0};
  const auto places = [&] {
    std::vector<std::pair<int, int>> found;
    for (int rank = 0; rank < 5; ++rank) {
      const auto local = local_place(nodes, rank);
      found.emplace_back(local.rank, local.size);
    }
    return found;
  }();
  EXPECT_EQ(places, (std::vector<std::pair<int, int>>{{0, 2}, {0, 3}, {1, 3}, {1, 2}, {2, 3}}));
}

TEST(NewPlace, TravelsAsText) {
  const NewPlace place{.rank = 3,
                       .size = 4,
                       .local = {1, 2},
                       .host = "10.0.0.2",
                       .port = 29500,
                       .epoch = 2,
                       .config = "{}",
                       .run = "lamina-7",
                       .restart = "1"};
  const auto read = NewPlace::read(place.text());
  EXPECT_EQ(read.text(), place.text());
  EXPECT_EQ(read.local.rank, 1);
  EXPECT_EQ(read.host, "10.0.0.2");
  EXPECT_EQ(read.run, "lamina-7");
  EXPECT_EQ(read.restart, "1");
  EXPECT_THROW(NewPlace::read(R"({"rank": 1, "size": 2})"), base::FormatError);
}

std::pair<base::Fd, base::Fd> ends() {
  int made[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, made), 0);
  return {base::Fd(made[0]), base::Fd(made[1])};
}

TEST(DoorLine, HearsWordsInTheirOrderAndNoneThatWasChangedOrSaidAgain) {
  const Secret key = contact::random_secret(), other = contact::random_secret();
  auto [one, two] = ends();
  const int wire = two.get();
  DoorLine says({std::move(one), key, other}), hears({std::move(two), other, key});
  EXPECT_EQ(hears.hear(), std::nullopt);
  EXPECT_TRUE(says.say(DoorWord::kWait, "for a while"));
  EXPECT_TRUE(says.say(DoorWord::kIn));
  EXPECT_EQ(hears.hear(), std::pair(DoorWord::kWait, std::string("for a while")));
  EXPECT_EQ(hears.hear(), std::pair(DoorWord::kIn, std::string()));
  EXPECT_TRUE(says.say(DoorWord::kOver));
  char bytes[256];
  const auto count = ::recv(wire, bytes, sizeof bytes, MSG_PEEK);
  ASSERT_GT(count, 0);
  EXPECT_EQ(hears.hear(), std::pair(DoorWord::kOver, std::string()));
  ASSERT_EQ(::send(says.fd(), bytes, count, 0), count);  // the same once more
  EXPECT_THROW(hears.hear(), base::PeerError);
}

TEST(DoorLine, HearsThatTheOtherEndHasGone) {
  auto [one, two] = ends();
  DoorLine line({std::move(one), {}, {}});
  EXPECT_EQ(line.hear_knocks(), 0u);
  {
    DoorLine other({std::move(two), {}, {}});
    EXPECT_TRUE(other.knock());
    EXPECT_EQ(line.hear_knocks(), 1u);
  }
  EXPECT_EQ(line.hear_knocks(), std::nullopt);
  EXPECT_THROW(line.hear(), base::PeerError);
}

class DoorTest : public testing::Test {
 protected:
  void SetUp() override {
    file_ = base::Fd(::memfd_create("door", MFD_CLOEXEC));
    ::setenv(environment::kDoorVariable, std::to_string(file_.get()).c_str(), 1);
    plate_ = environment::DoorPlate::of_environment();
    door_.emplace(*plate_, "127.0.0.1", secret_, kFacts);
    door_->set_terms({.ranks = 2, .most = 4, .why_not = shares_out_12});
  }
  void TearDown() override {
    door_.reset();
    ::unsetenv(environment::kDoorVariable);
  }

  base::Fd connect() const { return environment::Address::parse(plate_->read().door).begin_connect(); }

  // A line of somebody with that secret and these facts; none where the door closes.
  std::optional<DoorLine> come(const Secret& secret, const Facts& facts, std::string* why = nullptr,
                               const Entrant& entrant = {}) const {
    const Identity self{base::Rank(1), 2, secret, "door", {to_bytes(of_guest(entrant, facts)), ""}};
    Handshake handshake(self, connect(), base::Rank(0), base::Deadline::after(20s));
    auto state = Handshake::State::kRunning;
    while ((state = handshake.advance()) == Handshake::State::kRunning) std::this_thread::sleep_for(1ms);
    if (why != nullptr) *why = handshake.failure();
    if (state != Handshake::State::kDone) return std::nullopt;
    return DoorLine(handshake.take());
  }
  std::optional<DoorLine> come(const Entrant& entrant = {}) const { return come(secret_, kFacts, nullptr, entrant); }

  static std::pair<DoorWord, std::string> first_word(DoorLine& line) {
    std::optional<std::pair<DoorWord, std::string>> heard;
    eventually([&] { return (heard = line.hear()).has_value(); });
    return heard.value_or(std::pair(DoorWord::kWait, "nothing"));
  }

  // The next word that is not one of waiting.
  static std::pair<DoorWord, std::string> word(DoorLine& line) {
    std::optional<std::pair<DoorWord, std::string>> heard;
    eventually([&] {
      heard = line.hear();
      return heard && heard->first != DoorWord::kWait;
    });
    return heard.value_or(std::pair(DoorWord::kWait, "nothing else"));
  }

  const Secret secret_ = contact::random_secret();
  base::Fd file_;
  std::optional<environment::DoorPlate> plate_;
  std::optional<Door> door_;
};

TEST_F(DoorTest, WhoHasTheSecretAndTheFactsWaitsAndGetsAPlace) {
  EXPECT_FALSE(door_->has_waiting());
  auto one = come(), two = come({.node = 3});
  ASSERT_TRUE(one && two);
  ASSERT_TRUE(eventually([&] { return door_->has_waiting(); }));
  EXPECT_TRUE(data_parallel::newcomers().wait);
  std::vector<int> machines;
  ASSERT_TRUE(eventually([&] { return (machines = door_->take(2)).size() == 2; }));
  EXPECT_EQ(machines, (std::vector<int>{0, 3}));
  EXPECT_FALSE(data_parallel::newcomers().wait) << "they are taken";
  door_->tell({"first", "second"});
  EXPECT_FALSE(door_->has_lost());
  EXPECT_EQ(word(*one), std::pair(DoorWord::kPlace, std::string("first")));
  EXPECT_EQ(word(*two), std::pair(DoorWord::kPlace, std::string("second")));
  door_->let_in();
  EXPECT_EQ(word(*one).first, DoorWord::kIn);
  EXPECT_EQ(word(*two).first, DoorWord::kIn);
  EXPECT_TRUE(door_->take(4).empty());
}

TEST_F(DoorTest, WhoDiffersIsRefusedByName) {
  auto facts = kFacts;
  facts[0].second = "2.1";
  auto line = come(secret_, facts);
  ASSERT_TRUE(line);
  EXPECT_EQ(word(*line),
            std::pair(DoorWord::kRefused, std::string("its version of torch is another one: 2.1; the job has 2.0")));
  EXPECT_FALSE(door_->has_waiting());
}

TEST_F(DoorTest, StrangersDisturbNobody) {
  std::string why;
  EXPECT_FALSE(come(contact::random_secret(), kFacts, &why));
  EXPECT_EQ(why, "it lacks this job's secret");
  std::vector<base::Fd> strangers;
  for (int i = 0; i < 100; ++i) {
    strangers.push_back(connect());
    ::send(strangers.back().get(), "GET / HTTP/1.1\r\n\r\n", 18 * (i % 2), MSG_NOSIGNAL);
  }
  auto line = come();
  ASSERT_TRUE(line);
  EXPECT_TRUE(eventually([&] { return door_->has_waiting(); }));
  auto garbage = come(secret_, {{"a", std::string(60000, 'x')}});
  ASSERT_TRUE(garbage);
  EXPECT_EQ(word(*garbage).first, DoorWord::kRefused);
}

TEST_F(DoorTest, WhoDiesOrFallsSilentIsNotCounted) {
  auto line = come();
  ASSERT_TRUE(eventually([&] { return door_->has_waiting(); }));
  line.reset();
  EXPECT_TRUE(eventually([&] { return !door_->has_waiting(); }));
  auto silent = come();
  ASSERT_TRUE(eventually([&] { return door_->has_waiting(); }));
  EXPECT_TRUE(eventually([&] { return !door_->has_waiting(); })) << "frozen";
  EXPECT_TRUE(door_->take(2).empty());
  silent->knock();
  EXPECT_TRUE(eventually([&] { return door_->has_waiting(); })) << "it goes on";
}

TEST_F(DoorTest, WhoDiesOnTheWayInIsLostAndTheOthersComeAgain) {
  auto one = come(), two = come();
  ASSERT_TRUE(eventually([&] { return door_->take(2).size() == 2; }));
  door_->tell({"first", "second"});
  EXPECT_EQ(word(*two).first, DoorWord::kPlace);
  one.reset();
  ASSERT_TRUE(eventually([&] { return door_->has_lost(); }));
  door_->send_away();
  EXPECT_FALSE(door_->has_lost());
  EXPECT_EQ(word(*two).first, DoorWord::kAgain);
  EXPECT_THROW(word(*two), base::PeerError);
  auto again = come();
  EXPECT_TRUE(eventually([&] { return door_->has_waiting(); }));
}

TEST_F(DoorTest, WhoDiffersByTheTimeItWouldEnterIsRefused) {
  auto now = kFacts;
  now[1].second += "\nc float32 (4,)";
  door_->set_terms({.ranks = 2, .most = 4, .facts = [now] { return now; }});
  auto one = come();
  ASSERT_TRUE(eventually([&] { return door_->has_waiting(); }));
  EXPECT_TRUE(door_->take(2).empty());
  std::optional<std::pair<DoorWord, std::string>> last;
  ASSERT_TRUE(eventually([&] {
    if (auto heard = one->hear()) last = heard;
    return last && last->first == DoorWord::kRefused;
  }));
  EXPECT_EQ(last->second, "its model is another one: nothing more; the job has c float32 (4,)");
}

TEST_F(DoorTest, WhoWasTakenAndHasNoPlaceCountsAnew) {
  auto one = come(), two = come();
  ASSERT_TRUE(eventually([&] { return door_->take(2).size() == 2; }));
  EXPECT_EQ(door_->take(3).size(), 1u);
  door_->send_away();
  EXPECT_TRUE(door_->take(4).empty());
}

TEST_F(DoorTest, WhoWaitsInVainIsToldWhyAndTheEnd) {
  door_->set_terms({.ranks = 4, .most = 5, .why_not = shares_out_12});
  auto line = come();
  ASSERT_TRUE(line);
  std::optional<std::pair<DoorWord, std::string>> heard;
  ASSERT_TRUE(eventually([&] { return (heard = line->hear()).has_value(); }));
  EXPECT_EQ(*heard, std::pair(DoorWord::kWait, std::string("5 ranks cannot share out 12")));
  door_->end();
  EXPECT_EQ(word(*line).first, DoorWord::kOver);
  EXPECT_TRUE(plate_->read().is_over);
}

TEST_F(DoorTest, ThoseWhomALauncherHasBegunEnterTogetherAndTheNextOnesLater) {
  door_->set_terms({.ranks = 2, .most = 9, .every = 1h});
  const Entrant by_hand{.node = 7, .together = 2};
  auto one = come(by_hand);
  ASSERT_TRUE(one);
  EXPECT_EQ(first_word(*one), std::pair(DoorWord::kWait, std::string())) << "there is a place";
  EXPECT_FALSE(door_->has_waiting());
  auto two = come(by_hand);
  ASSERT_TRUE(eventually([&] { return door_->has_waiting(); }));
  EXPECT_EQ(door_->take(2), (std::vector<int>{7, 7}));
  door_->tell({"first", "second"});
  door_->let_in();
  door_->set_terms({.ranks = 4, .most = 9, .every = 1h});
  auto three = come({.node = 8, .together = 1});
  ASSERT_TRUE(three);
  first_word(*three);
  EXPECT_FALSE(door_->has_waiting());
  auto back = come();
  ASSERT_TRUE(eventually([&] { return door_->has_waiting(); })) << "one that comes back";
  EXPECT_EQ(door_->take(4), (std::vector<int>{8, 0}));
}

TEST_F(DoorTest, ASpareTakesThePlaceOfALostRankAtOnce) {
  door_->set_terms({.ranks = 4, .most = 4, .why_not = shares_out_12, .every = 1h});
  auto line = come({.node = 7, .together = 1});
  ASSERT_TRUE(line);
  EXPECT_EQ(first_word(*line),
            std::pair(DoorWord::kWait, std::string("the job has as many ranks as --elastic allows it: 4")));
  EXPECT_FALSE(door_->has_waiting());
  EXPECT_EQ(door_->take(3), (std::vector<int>{7}));
}

TEST_F(DoorTest, WhoWaitsHearsThatTheDoorHasGone) {
  auto line = come();
  ASSERT_TRUE(eventually([&] { return door_->has_waiting(); }));
  door_.reset();
  EXPECT_THROW(word(*line), base::PeerError);
  EXPECT_FALSE(data_parallel::newcomers().wait);
}

}  // namespace
}  // namespace lamina::session
