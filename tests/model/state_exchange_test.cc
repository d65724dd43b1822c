// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/state_exchange.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "lamina/value/released.h"
#include "tests/messaging/mailboxes.h"

namespace lamina::model {
namespace {

const base::Patience kPatience{std::chrono::seconds(30), nullptr};

using Entries = std::vector<Entry>;

class StateExchange : public ::testing::Test {
 protected:
  // The bytes that each rank received.
  std::vector<std::int64_t> synchronize_all(std::vector<Entries>& of_rank) {
    std::vector<std::int64_t> received(of_rank.size());
    errors_ = boxes_.run([&](int rank) {
      received[rank] = synchronize(of_rank[rank], boxes_.ranks(), boxes_[rank], base::Rank(rank), kPatience);
    });
    return received;
  }
  std::vector<std::string> error_texts() const {
    std::vector<std::string> texts;
    for (const auto& error : errors_) {
      try {
        if (error) std::rethrow_exception(error);
        texts.emplace_back();
      } catch (const base::ConfigError& caught) {
        texts.emplace_back(caught.what());
      } catch (const std::exception& caught) {
        texts.push_back(std::string("no ConfigError: ") + caught.what());
      }
    }
    return texts;
  }
  // Two parameters of `value`; rank i owns those of `owned`.
  static Entries model(double value, bool first = true, bool second = true) {
    return {{"a", at::full({4}, value, at::kDouble).set_requires_grad(true), first},
            {"b", at::full({2, 3}, value), second}};
  }

  messaging::Mailboxes boxes_{3, 1};
  std::vector<std::exception_ptr> errors_;
};

TEST_F(StateExchange, OwnersGetTheValuesOfTheFirstRankAndOnlyThoseThatDiffer) {
  std::vector<Entries> ranks = {model(1), model(1, false, true), model(2, true, false)};
  EXPECT_EQ(synchronize_all(ranks), (std::vector<std::int64_t>{0, 0, 32}));
  EXPECT_EQ(error_texts(), std::vector<std::string>(3));
  EXPECT_TRUE(at::equal(ranks[2][0].tensor, ranks[0][0].tensor));
  EXPECT_TRUE(ranks[2][0].tensor.requires_grad() && ranks[2][0].tensor.is_leaf());
  EXPECT_TRUE(at::equal(ranks[2][1].tensor, at::full({2, 3}, 2.0)));  // not owned: left alone
}

TEST_F(StateExchange, AValueIsComparedByItsElementsNotItsLayout) {
  std::vector<Entries> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    const auto wide = at::arange(6).view({2, 3});
    ranks.push_back({{"w", rank == 1 ? wide.t().contiguous().t() : wide, true}});
  }
  EXPECT_EQ(synchronize_all(ranks), (std::vector<std::int64_t>{0, 0, 0}));
}

TEST_F(StateExchange, AValueThatIsNotHereMayBeUndefinedOrReleased) {
  std::vector<Entries> ranks = {model(1), model(2, false, true), model(2, true, false)};
  ranks[1][0].tensor = at::Tensor();
  value::release(ranks[2][1].tensor, "elsewhere");
  EXPECT_EQ(synchronize_all(ranks), (std::vector<std::int64_t>{0, 24, 32}));
  EXPECT_EQ(error_texts(), std::vector<std::string>(3));
}

TEST_F(StateExchange, DifferentModelsAreAConfigErrorOnEveryRankThatNamesTheDifference) {
  const auto with = [](const std::function<void(Entries&)>& change) {
    auto entries = model(1);
    change(entries);
    return entries;
  };
  const std::vector<std::pair<Entries, const char*>> cases = {
      {with([](Entries& e) { e[1].name = "c"; }), "rank 1 has \"c\""},
      {with([](Entries& e) { e[1].tensor = at::full({3, 2}, 1.0); }), "[3, 2]"},
      {with([](Entries& e) { e[1].tensor = at::full({2, 3}, 1, at::kLong); }), "Long"},
      {with([](Entries& e) { e.pop_back(); }), "\"b\", which only the first rank has"},
      {with([](Entries& e) { e.push_back({"c", at::arange(1), true}); }), "\"c\", which the first rank does not have"},
  };
  for (const auto& [other, text] : cases) {
    std::vector<Entries> ranks = {model(1), other, model(1)};
    synchronize_all(ranks);
    for (const auto& error : error_texts()) {
      EXPECT_NE(error.find("the ranks built different models: rank 1 has"), std::string::npos) << error;
      EXPECT_NE(error.find(text), std::string::npos) << error;
    }
  }
  std::vector<Entries> same = {model(1), model(2), model(1)};  // the mailboxes hold nothing of the failed rounds
  EXPECT_EQ(synchronize_all(same), (std::vector<std::int64_t>{0, 56, 0}));
}

TEST_F(StateExchange, GatherGivesEveryMemberAllValuesFromTheirOwners) {
  std::vector<Entries> ranks = {model(1, true, false), model(2, false, true), model(3, false, false)};
  value::release(ranks[0][1].tensor, "elsewhere");
  ranks[2][0].tensor = at::Tensor();
  errors_ = boxes_.run([&](int rank) {
    const auto tensors = gather(ranks[rank], boxes_.ranks(), boxes_[rank], kPatience);
    ASSERT_TRUE(at::equal(tensors.at(0), at::full({4}, 1, at::kDouble)));
    ASSERT_FALSE(tensors.at(0).requires_grad());
    ASSERT_TRUE(at::equal(tensors.at(1), at::full({2, 3}, 2.0)));
  });
  EXPECT_EQ(error_texts(), std::vector<std::string>(3));
}

TEST_F(StateExchange, GatherOfAValueThatNobodyOwnsIsAnErrorOnEveryRankThatNamesIt) {
  std::vector<Entries> ranks(3, model(1, true, false));
  errors_ = boxes_.run([&](int rank) { gather(ranks[rank], boxes_.ranks(), boxes_[rank], kPatience); });
  for (const auto& error : errors_) EXPECT_THROW(std::rethrow_exception(error), base::UsageError);
}

}  // namespace
}  // namespace lamina::model
