// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/parameter_table.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "lamina/base/error.h"
#include "tests/model/tables.h"

namespace lamina::model {
namespace {

TEST(ParameterTable, KnowsWhatIsHereByRowTensorAndName) {
  const ParameterTable table = two_rows(1, 0);
  const auto& [a, b] = std::tie(table.all()[0], table.all()[1]);
  EXPECT_EQ(table.here(), std::vector<const Parameter*>{&a});
  EXPECT_EQ(table.find(a.tensor), &a);
  EXPECT_EQ(table.find("b"), &b);
  EXPECT_EQ(table.find("c"), nullptr);
  EXPECT_TRUE(table.whole_here(a.tensor));
  EXPECT_FALSE(table.whole_here(b.tensor));
  EXPECT_TRUE(table.whole_here(at::ones({1})));  // nothing of the model's
  EXPECT_FALSE(table.whole_everywhere());
}

TEST(ParameterTable, FindsTheParameterOfAGradient) {
  const ParameterTable table = two_rows(1, 0);
  const auto& a = table.all()[0];
  a.tensor.mutable_grad() = at::zeros({4}, at::kDouble);
  const std::vector<at::Tensor> given{a.tensor.grad(), a.tensor, at::zeros({4}, at::kDouble), at::Tensor()};
  EXPECT_EQ(table.find_with_gradients(given), (std::vector<const Parameter*>{&a, &a, nullptr, nullptr}));
  EXPECT_EQ(table.find(at::Tensor()), nullptr);
}

TEST(ParameterTable, HasALayoutForEachRow) {
  const ParameterTable table = two_rows(1, 0);
  const layout::ParameterLayout& b = table.all()[1].layout;
  EXPECT_EQ(b.shape, (layout::Shape{2, 3}));
  EXPECT_TRUE(b.buffer);
  EXPECT_EQ(b.dtype, layout::DType::kFloat32);
  EXPECT_NO_THROW(layout::check(b));
}

TEST(ParameterTable, IsWholeEverywhereOnlyWithOnePartitionAndNothingCut) {
  std::vector<Parameter> rows{whole_in(base::Partition(0), "a", at::ones({4}), false, 2)};
  EXPECT_TRUE(ParameterTable(rows, base::Partition(0), 1).whole_everywhere());
  EXPECT_FALSE(ParameterTable(rows, base::Partition(0), 2).whole_everywhere());  // the other rank has nothing
  rows[0].layout.shards = 2;
  const ParameterTable sharded(rows, base::Partition(0), 1);
  EXPECT_FALSE(sharded.whole_everywhere());
  EXPECT_TRUE(sharded.is_here(sharded.all()[0]));
  EXPECT_FALSE(sharded.whole_here(sharded.all()[0]));
}

TEST(ParameterTable, RefusesATensorOrANameThatItHas) {
  const at::Tensor tensor = at::ones({4});
  const auto row = [&](const char* name, const at::Tensor& of) {
    return whole_in(base::Partition(0), name, of, false, 1);
  };
  EXPECT_THROW(ParameterTable({row("a", tensor), row("b", tensor)}, base::Partition(0), 1), base::InternalError);
  EXPECT_THROW(ParameterTable({row("a", tensor), row("a", at::ones({4}))}, base::Partition(0), 1), base::InternalError);
}

TEST(ParameterTable, NamesATensorOfADtypeThatCannotBeSpread) {
  try {
    whole_in(base::Partition(0), "codes", at::empty({2}, at::kBits8), true, 1);
    FAIL();
  } catch (const base::UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("codes has the dtype Bits8"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace lamina::model
