// SPDX-License-Identifier: Apache-2.0
#include "lamina/remote/bursts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lamina::remote {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
constexpr bool kSaysMore = true, kSaysNoMore = false;

base::CallId call(std::int64_t number, std::int64_t microbatch = 0, std::int64_t caller = 0) {
  return {base::Rank(caller), base::Step(3), base::Microbatch(microbatch), number};
}

// The numbers of the calls whose answers are sent.
std::vector<std::int64_t> due(Bursts& bursts, const base::CallId& request, bool says_more) {
  std::vector<std::int64_t> numbers;
  for (const auto& answer : bursts.due(Answer{request}, says_more)) numbers.push_back(answer.call.counter);
  return numbers;
}

TEST(Bursts, AnAnswerWaitsForTheNextCallThatIsReady) {
  Bursts bursts;
  for (int i = 0; i < 3; ++i) bursts.ready(call(i));
  EXPECT_THAT(due(bursts, call(0), kSaysNoMore), IsEmpty());
  EXPECT_THAT(due(bursts, call(1), kSaysNoMore), IsEmpty());
  EXPECT_THAT(due(bursts, call(2), kSaysNoMore), ElementsAre(0, 1, 2));
}

TEST(Bursts, TheLastAnswerWaitsForNothing) {
  Bursts bursts;
  bursts.ready(call(0));
  EXPECT_THAT(due(bursts, call(0), kSaysNoMore), ElementsAre(0));
  bursts.ready(call(1));
  EXPECT_THAT(due(bursts, call(1), kSaysNoMore), ElementsAre(1));
}

TEST(Bursts, WhatSaysMoreTakesAllThatWaitWithIt) {
  Bursts bursts;
  for (int i = 0; i < 3; ++i) bursts.ready(call(i));
  EXPECT_THAT(due(bursts, call(0), kSaysNoMore), IsEmpty());
  EXPECT_THAT(due(bursts, call(1), kSaysMore), ElementsAre(0, 1));
  EXPECT_THAT(due(bursts, call(2), kSaysNoMore), ElementsAre(2));
}

TEST(Bursts, OtherMicrobatchesAndRanksAreNotWaitedFor) {
  Bursts bursts;
  bursts.ready(call(0, /*microbatch=*/0, /*caller=*/0));
  bursts.ready(call(1, /*microbatch=*/1, /*caller=*/0));
  bursts.ready(call(2, /*microbatch=*/0, /*caller=*/1));
  EXPECT_THAT(due(bursts, call(0, 0, 0), kSaysNoMore), ElementsAre(0));
}

}  // namespace
}  // namespace lamina::remote
