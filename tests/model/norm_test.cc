// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/norm.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/model/tables.h"

namespace lamina::model {
namespace {

// The norm that each of three ranks finds, which gives `measured(table)`.
std::vector<std::vector<double>> norms_of_all(
    const std::function<std::vector<Measured>(const ParameterTable&, int rank)>& measured, double norm_type = 2) {
  messaging::Mailboxes boxes(3, 1);
  std::vector<std::vector<double>> found(3);
  const auto errors = boxes.run([&](int rank) {
    const auto table = two_rows(1, rank);
    for (const auto& norm : norms(table, measured(table, rank), norm_type, boxes.ranks(), boxes[rank], kPatience)) {
      found[rank].push_back(norm.item<double>());
    }
  });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return found;
}

using Found = std::vector<std::vector<double>>;

TEST(Norms, AreThoseOfTheRanksThatHoldEachRowInTheModelsOrderOnAll) {
  const auto all = [](const ParameterTable& table, int) {
    const at::Tensor a = table.all()[0].tensor, b = table.all()[1].tensor;
    return std::vector<Measured>{{b, at::full({2, 3}, 2.0)}, {a, at::full({4}, 3.0)}};
  };
  const double b = std::sqrt(6 * 4.0);
  for (const auto& found : norms_of_all(all)) {
    ASSERT_EQ(found.size(), 2);
    EXPECT_DOUBLE_EQ(found[0], 6);
    EXPECT_NEAR(found[1], b, 1e-6);
  }
  EXPECT_EQ(norms_of_all(all, std::numeric_limits<double>::infinity()), Found(3, {3, 2}));
}

TEST(Norms, LeaveOutWhatNobodyMeasuresAndPutLastWhatTheLeadingRankHasBeside) {
  const auto given = [](const ParameterTable& table, int rank) {
    std::vector<Measured> all{{at::full({1}, 1.0), at::full({1}, 10.0 + rank)}};
    all.emplace_back(table.all()[0].tensor, at::Tensor());
    all.emplace_back(table.all()[1].tensor, rank == 1 ? at::full({1}, 5.0) : at::Tensor());
    return all;
  };
  EXPECT_EQ(norms_of_all(given), Found(3, {5, 10}));
}

TEST(Norms, CountARowAsOftenAsItIsGiven) {
  const auto twice = [](const ParameterTable& table, int) {
    const at::Tensor a = table.all()[0].tensor;
    return std::vector<Measured>{{a, at::full({4}, 3.0)}, {a, at::full({4}, 3.0)}};
  };
  EXPECT_EQ(norms_of_all(twice), Found(3, {6, 6}));
}

TEST(Norms, OfSlicesAreThoseOfTheWhole) {
  const at::Tensor whole = at::arange(-2, 4, at::kDouble);
  for (const double order : {0., 1., 2., std::numeric_limits<double>::infinity()}) {
    messaging::Mailboxes boxes(4, 1);  // neighbours have the same slice
    const auto errors = boxes.run([&](int rank) {
      std::vector<Parameter> rows{
          whole_in(base::Partition(0), "cut", whole.narrow(0, rank / 2 * 3, 3).clone(), false, 1),
          whole_in(base::Partition(0), "alike", whole.clone(), false, 1)};
      slice(rows[0], {0, {{6, 1}}, 2});
      const ParameterTable table(std::move(rows), base::Partition(0), 1, {rank, 4});
      std::vector<Measured> measured;
      for (const auto& row : table.all()) measured.emplace_back(row.tensor, row.tensor);
      const auto found = norms(table, measured, order, boxes.ranks(), boxes[rank], kPatience);
      ASSERT_EQ(found.size(), 2);
      EXPECT_DOUBLE_EQ(found[0].item<double>(), norm_of(whole, order).item<double>());
      EXPECT_DOUBLE_EQ(found[1].item<double>(), norm_of(whole, order).item<double>());
    });
    for (const auto& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
}

}  // namespace
}  // namespace lamina::model
