// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/batch_record.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::data_parallel {
namespace {

const base::Patience kPatience{std::chrono::seconds(30), nullptr};

BatchRecord full_record() {
  return {.is_after_step = true,
          .samples = 1LL << 40,
          .tokens = 1LL << 50,
          .ended = 3,
          .seconds = 0.25,
          .losses = {0.5, -1.5, 2.0},
          .most_samples = 7,
          .has_data = true,
          .lacks_data = false,
          .stops = true,
          .lacks_memory = true,
          .names_differ = true,
          .loss_names = 0xfffffffe};
}

TEST(BatchRecord, TakesSixtyFourBytesAndComesBack) {
  auto record = full_record();
  EXPECT_EQ(to_bytes(record).size(), 64u);
  EXPECT_EQ(to_record(to_bytes(record)), record);
  EXPECT_EQ(to_bytes({}).size(), 64u);
  EXPECT_EQ(to_record(to_bytes({})), BatchRecord());
  record.losses = {1, 2, 3, 4, 5};
  EXPECT_EQ(to_bytes(record).size(), 80u);
  EXPECT_EQ(to_record(to_bytes(record)), record);
}

TEST(BatchRecord, RefusesBytesOfAnotherLength) {
  const auto bytes = to_bytes(full_record());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(to_record(std::string_view(bytes).substr(0, size)), base::FormatError) << size;
  }
  EXPECT_THROW(to_record(bytes + '\0'), base::FormatError);
}

TEST(BatchRecord, AddsUpWhatRanksHaveBeforeAStep) {
  messaging::Mailboxes boxes(5, 2);
  const auto errors = boxes.run([&](int rank) {
    BatchRecord own;
    if (rank % 2 == 0) {  // the others follow
      own.give_samples(10 + rank, 100);
      own.has_data = true;
    }
    own.stops = rank == 3;
    const auto all = together(boxes[rank], boxes.ranks(), own, kPatience);
    EXPECT_EQ(all, (BatchRecord{.samples = 36, .tokens = 300, .most_samples = 14, .has_data = true, .stops = true}));
  });
  for (const auto& error : errors) EXPECT_EQ(error, nullptr);
}

TEST(BatchRecord, AddsUpLossesAfterAStepAndTellsWhereTheirNamesDiffer) {
  messaging::Mailboxes boxes(4, 2);
  for (const bool alike : {true, false}) {
    const auto errors = boxes.run([&](int rank) {
      BatchRecord own{.is_after_step = true};
      own.name_losses(std::vector<std::string>{"a", alike || rank != 2 ? "total" : "other"});
      if (rank == 0) own.seconds = 1.5;
      if (rank != 1) own.losses = {0.25, 1.0 * rank};
      const auto all = together(boxes[rank], boxes.ranks(), own, kPatience);
      EXPECT_EQ(all.seconds, 1.5);
      EXPECT_EQ(all.losses, (std::vector{0.75, 5.0}));
      EXPECT_EQ(all.names_differ, !alike);
      EXPECT_FALSE(all.lacks_memory);
    });
    for (const auto& error : errors) EXPECT_EQ(error, nullptr);
  }
}

TEST(BatchRecord, RefusesRanksAtDifferentMomentsOnAll) {
  messaging::Mailboxes boxes(4, 2);
  const auto errors = boxes.run([&](int rank) {
    BatchRecord own;
    if (rank == 3) own.is_after_step = true;
    together(boxes[rank], boxes.ranks(), own, kPatience);
  });
  for (const auto& error : errors) {
    ASSERT_TRUE(error);
    EXPECT_THROW(std::rethrow_exception(error), base::UsageError);
  }
}

}  // namespace
}  // namespace lamina::data_parallel
