// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/agreement.h"

#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/model/tables.h"

namespace lamina::model {
namespace {

using value::Value;

// The word that each of three ranks is told or, after an exclamation mark, has thrown.
std::vector<std::string> agree_all(const std::vector<Statement>& statements) {
  messaging::Mailboxes boxes(3, 1);
  std::vector<std::string> told(3);
  const auto errors = boxes.run(
      [&](int rank) { told[rank] = agree(statements[rank], boxes.ranks(), boxes[rank], kPatience).as<std::string>(); });
  for (int rank = 0; rank < 3; ++rank) {
    try {
      if (errors[rank]) std::rethrow_exception(errors[rank]);
    } catch (const base::ConfigError& error) {
      told[rank] = std::string("!config: ") + error.what();
    } catch (const base::UsageError& error) {
      told[rank] = std::string("!usage: ") + error.what();
    }
  }
  return told;
}

TEST(Agreement, GivesEachRankTheWordOfTheFirst) {
  EXPECT_EQ(agree_all({{"m", "", "plan"}, {"m", "", "b"}, {"m", "", "c"}}), std::vector<std::string>(3, "plan"));
}

TEST(Agreement, NamesTheFirstLineInWhichTheFirstOtherModelDiffers) {
  EXPECT_EQ(agree_all({{"a\nb\nc", "", ""}, {"a\nb\nc", "", ""}, {"a\nx\ny", "", ""}}),
            std::vector<std::string>(3,
                                     "!usage: rank 2 built another model than rank 0: x instead of b "
                                     "[model-ranks-differ]\nmore: lamina explain model-ranks-differ"));
  EXPECT_EQ(agree_all({{"a\nb", "", ""}, {"a", "", ""}, {"a\nb\nc", "", ""}}),
            std::vector<std::string>(3,
                                     "!usage: rank 1 built another model than rank 0: nothing instead of b "
                                     "[model-ranks-differ]\nmore: lamina explain model-ranks-differ"));
  EXPECT_EQ(agree_all({{"a", "", ""}, {"a", "", ""}, {"a\nb", "", ""}}),
            std::vector<std::string>(3,
                                     "!usage: rank 2 built another model than rank 0: b instead of nothing "
                                     "[model-ranks-differ]\nmore: lamina explain model-ranks-differ"));
}

TEST(Agreement, ThrowsTheErrorOfThePlanOnAllRanks) {
  EXPECT_EQ(agree_all({{"a", "it does not fit", ""}, {"a", "", ""}, {"b", "", ""}}),
            std::vector<std::string>(3, "!config: it does not fit"));
}

}  // namespace
}  // namespace lamina::model
