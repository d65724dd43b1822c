// SPDX-License-Identifier: Apache-2.0
#include "lamina/transport/silence.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace lamina::transport {
namespace {

using base::Rank;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Looks each tenth of a second, and hears what peers say then.
class SilenceTest : public ::testing::Test {
 protected:
  void pass(milliseconds span, const std::vector<Rank>& speaking) {
    for (milliseconds gone{0}; gone < span; gone += milliseconds(100)) {
      now_ += milliseconds(100);
      signs_ += silence_.look(now_) ? 1 : 0;
      for (const Rank peer : speaking) silence_.heard(peer);
    }
  }

  Silence::Time now_{seconds(1000)};
  Silence silence_{3, seconds(8), now_};
  int signs_ = 0;
};

TEST_F(SilenceTest, APeerThatSaysNothingForTheLimitIsSilent) {
  pass(milliseconds(7900), {Rank(1)});
  EXPECT_FALSE(silence_.is_silent(Rank(2)));
  pass(milliseconds(100), {Rank(1)});
  EXPECT_TRUE(silence_.is_silent(Rank(2)));
  EXPECT_FALSE(silence_.is_silent(Rank(1)));
  EXPECT_FALSE(silence_.has_stood_still());
}

TEST_F(SilenceTest, SignsAreDueEightTimesInTheLimit) {
  pass(seconds(8), {});
  EXPECT_EQ(signs_, 8);
}

TEST_F(SilenceTest, TimeInWhichThisProcessStoodStillCountsForNobody) {
  pass(seconds(3), {Rank(1), Rank(2)});
  now_ += seconds(100);
  silence_.look(now_);
  EXPECT_TRUE(silence_.has_stood_still());
  EXPECT_FALSE(silence_.is_silent(Rank(1)));
  pass(milliseconds(6800), {Rank(2)});
  EXPECT_FALSE(silence_.is_silent(Rank(1)));
  pass(milliseconds(200), {Rank(2)});
  EXPECT_TRUE(silence_.is_silent(Rank(1)));
  EXPECT_FALSE(silence_.is_silent(Rank(2)));
  EXPECT_FALSE(silence_.has_stood_still());
}

TEST_F(SilenceTest, SlowLooksAreNoStandstill) {
  for (int look = 0; look < 20; ++look) {
    now_ += seconds(3);
    silence_.look(now_);
    EXPECT_FALSE(silence_.has_stood_still());
    silence_.heard(Rank(1));
  }
  EXPECT_FALSE(silence_.is_silent(Rank(1)));
  EXPECT_TRUE(silence_.is_silent(Rank(2)));
}

TEST_F(SilenceTest, WhoWaitsForLooksWaitsForTwo) {
  std::atomic<bool> over = false;
  std::thread waits([&] {
    Silence::await_looks();
    over = true;
  });
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(over);
  int looks = 0;
  for (const auto by = base::Deadline::after(seconds(20)); !over && !by.expired(); ++looks) {
    silence_.look(now_);
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_GE(looks, 2);
  EXPECT_TRUE(over);
  waits.join();
}

TEST(Silence, NobodyWaitsWhereNobodyLooks) { Silence::await_looks(); }

}  // namespace
}  // namespace lamina::transport
