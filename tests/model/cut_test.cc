// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/cut.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/model/tables.h"

namespace lamina::model {
namespace {

ModuleTree three_modules() {
  ModuleTree tree;
  tree.add({.path = "", .id = 1});
  tree.add({.path = "a", .id = 2, .tensors = {{"weight", at::zeros({2})}}});
  tree.add({.path = "a.inner", .id = 3});
  tree.add({.path = "twin", .id = 2});
  tree.add({.path = "twin.inner", .id = 3});
  return tree;
}

TEST(Cut, KnowsTheOwnerOfEveryPartOfAStateByTheBeginningOfItsName) {
  const Cut cut(three_modules(), {0, 2, 1}, {1}, base::Partition(2));
  EXPECT_EQ(cut.owner_of(""), base::Partition(0));
  EXPECT_EQ(cut.owner_of("scale"), base::Partition(0));
  EXPECT_EQ(cut.owner_of("a"), base::Partition(2));
  EXPECT_EQ(cut.owner_of("twin.weight"), base::Partition(2));
  EXPECT_EQ(cut.owner_of("a.inner._extra_state"), base::Partition(1));
  EXPECT_TRUE(cut.owns("a.weight"));
  EXPECT_FALSE(cut.owns("a.inner"));
  EXPECT_EQ(cut.anywhere(), (std::vector<bool>{false, true, false}));
  EXPECT_LT(cut.position_of("a.weight"), cut.position_of("twin.inner.bias"));
}

TEST(Cut, IsTheFirstRanksPlanOnEveryRankWithItsWord) {
  messaging::Mailboxes boxes(3, 1);
  std::vector<std::string> told(3);
  const auto errors = boxes.run([&](int rank) {
    Proposal proposal{.word = std::int64_t(rank)};
    if (rank == 0) proposal.plan = Plan{.owners = {0, 1, 2}, .anywhere = {2}, .table = "as planned"};
    const auto agreed =
        agree_on_cut(three_modules(), proposal, base::Partition(rank), boxes.ranks(), boxes[rank], kPatience);
    told[rank] = std::to_string(agreed.word.as<std::int64_t>()) + " " + agreed.table +
                 (agreed.cut.anywhere()[2] ? " anywhere " : " ");
    for (const char* name : {"", "a", "a.inner"}) told[rank] += agreed.cut.owns(name) ? "+" : "-";
  });
  for (const auto& error : errors) EXPECT_FALSE(error);
  EXPECT_EQ(told, (std::vector<std::string>{"0 as planned anywhere +--", "0 as planned anywhere -+-",
                                            "0 as planned anywhere --+"}));
}

}  // namespace
}  // namespace lamina::model
