// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/messenger.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "lamina/base/str.h"
#include "lamina/transport/inproc/network.h"

namespace lamina::messaging {
namespace {

using ::testing::ElementsAre;

// Rank 0 of three, the others of which may die.
class MessengerTest : public ::testing::Test {
 protected:
  MessengerTest() {
    for (int rank = 1; rank < 3; ++rank) others_.push_back(network_.connect(base::Rank(rank)));
  }
  ~MessengerTest() override { messenger_.close(false); }

  // Waits until the mailbox has heard that `rank` is lost.
  base::Loss lost(int rank) {
    const base::Rank ranks[] = {base::Rank(rank)};
    return messenger_.mailbox().loss(ranks, std::chrono::seconds(30)).value();
  }

  transport::inproc::Network network_{3, 0};
  std::vector<std::unique_ptr<transport::Transport>> others_;
  observe::Recorder recorder_;
  Messenger messenger_{network_.connect(base::Rank(0)), recorder_};
};

TEST_F(MessengerTest, ALossIsToldWithWhatEachWatcherKnowsOfIt) {
  std::promise<std::string> told;
  messenger_.watch({[](base::Rank lost) { return base::str(", of whom ", lost, " knew"); },
                    [&](const base::Loss& loss) { told.set_value(loss.text()); }});
  messenger_.watch({[](base::Rank) { return "; more"; }, [](const base::Loss&) {}});
  messenger_.start();
  network_.kill(base::Rank(2));
  EXPECT_EQ(lost(2).details, ", of whom 2 knew; more");
  EXPECT_EQ(told.get_future().get(), lost(2).text());
}

TEST_F(MessengerTest, ALaterLossNamesTheFirstWhichMayBeItsCause) {
  messenger_.start();
  network_.kill(base::Rank(2));
  EXPECT_EQ(lost(2).details, "");
  network_.kill(base::Rank(1));
  EXPECT_EQ(lost(1).details, "; rank 2 was lost before");
}

TEST_F(MessengerTest, WhoWatchesHearsOfALossAfterTheMailbox) {
  std::promise<bool> known;
  messenger_.watch({[](base::Rank) { return ""; },
                    [&](const base::Loss&) { known.set_value(messenger_.mailbox().first_loss().has_value()); }});
  messenger_.start();
  network_.kill(base::Rank(1));
  EXPECT_TRUE(known.get_future().get());
}

TEST_F(MessengerTest, MessagesOfStepsAreRecorded) {
  recorder_.start({.ranks = {observe::RankRecord()}});
  messenger_.handlers().on("in a step", [](transport::Message&&) {});
  messenger_.start();
  transport::Message message;
  message.kind = "in a step";
  message.call.step = base::Step(3);
  messenger_.transport().send(base::Rank(1), message);
  messenger_.mailbox().send(base::Rank(1), "outside", std::int64_t{1});
  const observe::Timeline timeline = recorder_.stop();
  std::vector<std::string> names;
  for (const auto& event : timeline.ranks.at(0).events) names.push_back(event.name);
  EXPECT_THAT(names, ElementsAre("in a step"));
}

}  // namespace
}  // namespace lamina::messaging
