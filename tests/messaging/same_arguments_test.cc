// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/same_arguments.h"

#include <gtest/gtest.h>

#include "tests/messaging/mailboxes.h"

namespace lamina::messaging {
namespace {

const base::Patience kPatience{std::chrono::seconds(30), nullptr};

// Returns for each rank the words that it gets where it gives `of(rank)`.
std::vector<std::string> told(int ranks, const std::function<std::vector<Argument>(int)>& of) {
  Mailboxes boxes(ranks);
  std::vector<std::string> texts(ranks);
  const auto errors = boxes.run(
      [&](int rank) { texts[rank] = differing_arguments(boxes[rank], boxes.ranks(), "save()", of(rank), kPatience); });
  for (const auto& error : errors) EXPECT_EQ(error, nullptr);
  return texts;
}

TEST(SameArguments, NothingIsSaidOfThoseThatAreTheSame) {
  for (const auto& text : told(3, [](int) { return std::vector<Argument>{{"tag", "a"}, {"path", ""}}; })) {
    EXPECT_EQ(text, "");
  }
  EXPECT_EQ(told(1, [](int) { return std::vector<Argument>{{"tag", "a"}}; }).front(), "");
}

TEST(SameArguments, EveryRankIsToldEachThatDiffersWithItsValuesAndRanks) {
  const auto texts = told(4, [](int rank) {
    return std::vector<Argument>{
        {"tag", "a"}, {"partial", rank == 2 ? "False" : "True"}, {"keep", std::to_string(rank / 2)}};
  });
  for (const auto& text : texts) {
    EXPECT_EQ(
        text,
        "ranks have given different arguments: partial is True on ranks 0, 1, 3 and False on rank 2; keep is 0 on "
        "ranks 0, 1 and 1 on ranks 2, 3. All of them make one call: give the same on each");
  }
}

TEST(SameArguments, EveryRankIsToldOfAnotherCallWhateverItsArguments) {
  Mailboxes boxes(2);
  std::vector<std::string> texts(2);
  boxes.run([&](int rank) {
    const std::vector<Argument> arguments(rank, Argument{"tag", "a"});
    texts[rank] =
        differing_arguments(boxes[rank], boxes.ranks(), rank == 0 ? "save()" : "load()", arguments, kPatience);
  });
  for (const auto& text : texts) {
    EXPECT_EQ(text, "ranks make different calls: the call is save() on rank 0 and load() on rank 1");
  }
}

}  // namespace
}  // namespace lamina::messaging
