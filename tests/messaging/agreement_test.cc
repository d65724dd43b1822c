// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/agreement.h"

#include <gtest/gtest.h>

#include <atomic>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::messaging {
namespace {

using value::Value;

const base::Patience kPatience{std::chrono::seconds(30), nullptr};

void expect_none(const std::vector<std::exception_ptr>& errors) {
  for (const auto& error : errors) EXPECT_EQ(error, nullptr);
}

TEST(Agreement, GivesAllWhatTheFirstOfThoseGivesThatGiveSomething) {
  Mailboxes boxes(5);
  expect_none(boxes.run([&](int rank) {
    std::optional<Value> own;
    EXPECT_FALSE(first_given(boxes[rank], boxes.ranks(), own, kPatience));
    if (rank == 2 || rank == 4) own = std::int64_t{rank * 10};
    const auto first = first_given(boxes[rank], boxes.ranks(), own, kPatience);
    ASSERT_TRUE(first);
    EXPECT_EQ(first->rank, base::Rank(2));
    EXPECT_EQ(first->value.as<std::int64_t>(), 20);
  }));
}

TEST(Agreement, TellsAllWhetherNumbersAreAlikeAndTheWordOfTheFirst) {
  Mailboxes boxes(6, 1);
  expect_none(boxes.run([&](int rank) {
    EXPECT_TRUE(are_alike(boxes[rank], boxes.ranks(), 7, kPatience));
    EXPECT_FALSE(are_alike(boxes[rank], boxes.ranks(), rank == 3 ? 8 : 7, kPatience));
    EXPECT_FALSE(are_alike(boxes[rank], boxes.ranks(), rank % 2, kPatience));
    const auto led = hear_first(boxes[rank], boxes.ranks(), 7, std::int64_t{rank}, kPatience);
    EXPECT_TRUE(led.are_alike);
    EXPECT_EQ(led.word.as<std::int64_t>(), 0);
  }));
}

TEST(Agreement, FindsTheLargestNumberOfEachPlace) {
  Mailboxes boxes(3, 2);
  expect_none(boxes.run([&](int rank) {
    EXPECT_EQ(largest(boxes[rank], boxes.ranks(), {1.0 * rank, -1.0 * rank}, kPatience), (std::vector{2.0, 0.0}));
  }));
}

TEST(Agreement, RefusesNumbersOfDifferentCallsOnAll) {
  Mailboxes boxes(4, 2);
  const auto errors = boxes.run(
      [&](int rank) { largest(boxes[rank], boxes.ranks(), std::vector<double>(rank == 3 ? 2 : 3), kPatience); });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_THROW(std::rethrow_exception(error), base::UsageError);
  }
}

TEST(Agreement, EndsWithTheErrorOfTheFirstRankOnAll) {
  Mailboxes boxes(4, 3);
  const auto errors = boxes.run([&](int rank) {
    const auto act = [rank] {
      if (rank == 1 || rank == 3) throw base::FormatError(base::str("damage seen by ", rank));
    };
    act_together(boxes[rank], boxes.ranks(), act, kPatience);
  });
  for (int rank = 0; rank < 4; ++rank) {
    try {
      ASSERT_TRUE(errors[rank]);
      std::rethrow_exception(errors[rank]);
    } catch (const base::FormatError& error) {
      EXPECT_STREQ(error.what(), rank == 1 ? "damage seen by 1" : "on rank 1: damage seen by 1");
    }
  }
  expect_none(boxes.run([&](int rank) { act_together(boxes[rank], boxes.ranks(), [] {}, kPatience); }));
}

TEST(Agreement, GivesAllWhatTheFirstMakesOrItsError) {
  Mailboxes boxes(3, 4);
  std::atomic<int> calls = 0;
  expect_none(boxes.run([&](int rank) {
    const auto make = [&] {
      ++calls;
      return Value(std::int64_t{rank + 5});
    };
    EXPECT_EQ(made_by_first(boxes[rank], boxes.ranks(), make, kPatience).as<std::int64_t>(), 5);
  }));
  EXPECT_EQ(calls, 1);
  const auto errors = boxes.run([&](int rank) {
    made_by_first(boxes[rank], boxes.ranks(), []() -> Value { throw base::FormatError("no such"); }, kPatience);
  });
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(errors[rank]);
    try {
      std::rethrow_exception(errors[rank]);
    } catch (const base::FormatError& error) {
      EXPECT_STREQ(error.what(), rank == 0 ? "no such" : "on rank 0: no such");
    }
  }
}

}  // namespace
}  // namespace lamina::messaging
