// SPDX-License-Identifier: Apache-2.0
// Closed forms of benchmarks/scale_job.h: a rank sends no more than grows with the logarithm of their number.
#include <gtest/gtest.h>

#include <bit>
#include <map>

#include "benchmarks/scale_job.h"
#include "tests/archive/temp_folder.h"

namespace lamina::benchmarks {
namespace {

constexpr int kSizes[] = {4, 16, 64};

int log2_of(int size) { return std::bit_width(static_cast<unsigned>(size)) - 1; }

// Bytes of messages that are of one size, however many ranks there are, but for the names of groups.
void expect_bytes_as_messages(const std::map<int, Sent>& sent) {
  const auto each = [&](int size) {
    return static_cast<double>(sent.at(size).bytes) / static_cast<double>(sent.at(size).messages);
  };
  EXPECT_LT(each(64), 1.2 * each(4));
}

std::map<int, Sent> sent_in(const std::function<void(ScaleJob&, int)>& act) {
  std::map<int, Sent> sent;
  for (const int size : kSizes) {
    ScaleJob job(size);
    sent[size] = job.most_sent([&](int rank) { act(job, rank); });
  }
  return sent;
}

TEST(Scale, OfAStepIsTheLogarithmOfTheCopies) {
  const auto sent = sent_in([](ScaleJob& job, int rank) { job.step(rank); });
  for (const int size : kSizes) EXPECT_EQ(sent.at(size).messages, log2_of(size / 2)) << size;
  expect_bytes_as_messages(sent);
}

TEST(Scale, OfAClippedStepIsOneMessageForTheCopyAndTwiceTheLogarithmOfTheCopies) {
  const auto sent = sent_in([](ScaleJob& job, int rank) { job.clipped_step(rank); });
  for (const int size : kSizes) EXPECT_EQ(sent.at(size).messages, 1 + 2 * log2_of(size / 2)) << size;
  expect_bytes_as_messages(sent);
}

TEST(Scale, OfABatchOfATrainerIsTwiceTheLogarithmOfTheRanks) {
  const auto sent = sent_in([](ScaleJob& job, int rank) { job.batch(rank); });
  for (const int size : kSizes) EXPECT_EQ(sent.at(size).messages, 2 * log2_of(size)) << size;
  expect_bytes_as_messages(sent);
}

TEST(Scale, OfAStartIsThreeAgreements) {
  const auto sent = sent_in([](ScaleJob& job, int rank) { job.start(rank); });
  for (const int size : kSizes) EXPECT_EQ(sent.at(size).messages, 3 * log2_of(size)) << size;
  expect_bytes_as_messages(sent);
}

TEST(Scale, OfAResumptionIsNineAgreements) {
  const auto sent = sent_in([](ScaleJob& job, int rank) { job.resume(rank); });
  for (const int size : kSizes) EXPECT_EQ(sent.at(size).messages, 9 * log2_of(size)) << size;
  expect_bytes_as_messages(sent);
}

// Sockets to neighbours, and to ranks of all acts.
TEST(Scale, OfSocketsAreLessThanTenTimesTheLogarithmOfTheRanks) {
  const archive::testing::TempFolder folder;
  for (const int size : kSizes) {
    ScaleJob job(size);
    const auto expect_few = [&](const char* after) {
      EXPECT_LE(job.most_sockets(), 10 * log2_of(size)) << size << " after " << after;
      EXPECT_LT(job.most_sockets(), std::max(size, 5)) << size << " after " << after;
    };
    job.most_sent([&](int rank) {
      job.start(rank);
      job.clipped_step(rank);
      job.batch(rank);
      job.resume(rank);
      job.save(rank, folder / std::to_string(size));
    });
    expect_few("a save");
    job.most_sent([&](int rank) { job.leave(rank); });
    expect_few("the end of a program");
    const int lost = size / 2;  // which stands between others
    job.lose(lost);
    job.most_sent([&](int rank) { job.go_on_without(lost, rank); });
    expect_few("a change of epoch");
  }
}

TEST(Scale, OfARankThatFailsIsAWordToEachNeighbour) {
  for (const int size : kSizes) {
    ScaleJob job(size);
    const auto sent = job.most_sent([&](int rank) { job.fail(rank); });
    const int neighbours = size == 4 ? 3 : 2 * log2_of(size) - 1;
    EXPECT_LE(sent.messages, 2 * neighbours + 1);  // the failed rank says it, and hears it again
    EXPECT_EQ(job.most_sockets(), neighbours);
  }
}

// Ranks hand in up a tree, and down it comes how the save ended; so do words that it goes on.
TEST(Scale, OfASaveIsFourAgreementsAndAWordUpAndDownATree) {
  const archive::testing::TempFolder folder;
  for (const int size : {4, 16}) {
    ScaleJob job(size);
    const auto begin = base::Clock::now();
    const auto sent = job.most_sent([&](int rank) { job.save(rank, folder / std::to_string(size)); });
    const auto seconds = std::chrono::floor<std::chrono::seconds>(base::Clock::now() - begin).count();
    EXPECT_GE(sent.messages, 4 * log2_of(size) + 1);
    EXPECT_LE(sent.messages, (5 + seconds) * log2_of(size) + seconds);
  }
}

}  // namespace
}  // namespace lamina::benchmarks
