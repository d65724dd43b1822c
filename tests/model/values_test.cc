// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/values.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <gtest/gtest.h>

#include <atomic>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/value/released.h"
#include "tests/model/tables.h"

namespace lamina::model {
namespace {

const ValueHooks kHooks{nullptr, [](const Parameter& row) { return row.layout.name + " lives elsewhere; not here"; }};

// The bytes that each rank received.
std::vector<std::int64_t> give_all(std::vector<ParameterTable>& tables, const ValueHooks& hooks = kHooks,
                                   std::size_t portion_bytes = kPortionBytes) {
  messaging::Mailboxes boxes(static_cast<int>(tables.size()), 1);
  std::vector<std::int64_t> received(tables.size());
  const auto errors = boxes.run([&](int rank) {
    received[rank] = give_values(tables[rank], {boxes.ranks(), {}}, boxes[rank], kPatience, hooks, portion_bytes);
  });
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return received;
}

std::string error_of(const at::Tensor& tensor) {
  try {
    tensor.sum().item<double>();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

ParameterTable one_row(const at::Tensor& tensor, int here) {
  return {{whole_in(base::Partition(1), "w", tensor, false, 1)}, base::Partition(here), 2};
}

TEST(Values, GoToTheirHoldersWhereTheyDifferAndAreLetGoElsewhere) {
  std::vector<ParameterTable> ranks{two_rows(1, 0), two_rows(1, 1), two_rows(2, 2)};
  const at::Tensor kept = ranks[0].all()[0].tensor, gone = ranks[0].all()[1].tensor;
  EXPECT_EQ(give_all(ranks), (std::vector<std::int64_t>{0, 0, 0}));  // the third rank holds nothing
  EXPECT_FALSE(value::is_released(kept));
  EXPECT_TRUE(value::is_released(gone));
  EXPECT_EQ(value::where_released(gone), "b lives elsewhere");

  ranks = {two_rows(1, 0), two_rows(3, 1), two_rows(4, 0)};  // the third one holds the first row, too
  EXPECT_EQ(give_all(ranks), (std::vector<std::int64_t>{0, 24, 32}));
  const at::Tensor b = ranks[1].all()[1].tensor, a = ranks[2].all()[0].tensor;
  EXPECT_TRUE(at::equal(b, at::full({2, 3}, 1.0)));
  EXPECT_TRUE(at::equal(a, at::full({4}, 1, at::kDouble)));
  EXPECT_TRUE(a.requires_grad() && a.is_leaf());
}

TEST(Values, AreComparedByTheirElementsNotTheirStrides) {
  const auto wide = at::arange(6).view({2, 3});
  std::vector<ParameterTable> ranks{one_row(wide.clone(), 0), one_row(wide.t().contiguous().t(), 1)};
  EXPECT_EQ(give_all(ranks), (std::vector<std::int64_t>{0, 0}));
}

TEST(Values, AreMadeAPortionAtATimeBeforeTheyAreRead) {
  std::vector<ParameterTable> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    std::vector<Parameter> rows;  // of 60 bytes each, two of which are a portion
    for (int i = 0; i < 5; ++i) {
      rows.push_back(whole_in(base::Partition(0), std::to_string(i), at::full({60}, 0, at::kByte), false, 1));
    }
    ranks.emplace_back(std::move(rows), base::Partition(1), 2);  // nothing is here
  }
  std::mutex mutex;
  std::vector<std::size_t> portions;
  const ValueHooks hooks{[&](std::span<const Parameter> rows) {
                           const std::lock_guard guard(mutex);
                           portions.push_back(rows.size());
                         },
                         kHooks.why};
  give_all(ranks, hooks, 100);
  EXPECT_EQ(std::ranges::count(portions, 2), 4);
  EXPECT_EQ(std::ranges::count(portions, 1), 2);
}

// See [Note: memory of released values].
TEST(Values, LeaveNoMemoryToViewsThatAreAliveWhichSayWhy) {
  std::vector<float> memory(6, 1);
  bool freed = false;
  const at::Tensor w = at::from_blob(memory.data(), {2, 3}, [&](void*) { freed = true; });
  const at::Tensor view = w.t();
  EXPECT_EQ(error_of(view), "");
  release_others(one_row(w, 0), kHooks.why);
  EXPECT_TRUE(freed);
  EXPECT_NE(error_of(view).find("w lives elsewhere"), std::string::npos) << error_of(view);
  at::Tensor again = w;
  value::restore(again, at::full({2, 3}, 5.0));
  EXPECT_EQ(w.sum().item<double>(), 30);
}

TEST(Values, KeepMemoryInWhichAValueLiesThatIsHere) {
  const at::Tensor flat = at::arange(8, at::kDouble);
  const auto rows = [&] {
    return std::vector<Parameter>{whole_in(base::Partition(1), "a", flat.narrow(0, 0, 4), false, 1),
                                  whole_in(base::Partition(0), "b", flat.narrow(0, 4, 4), false, 1)};
  };
  const ParameterTable table(rows(), base::Partition(0), 2);
  release_others(table, kHooks.why);
  EXPECT_TRUE(value::is_released(table.all()[0].tensor));
  EXPECT_EQ(table.all()[1].tensor.sum().item<double>(), 22);
  EXPECT_EQ(flat.sum().item<double>(), 28);
}

TEST(Values, AreGatheredInTheModelsOrderFromThoseThatHoldThem) {
  messaging::Mailboxes boxes(3, 1);
  const auto errors = boxes.run([&](int rank) {
    const ParameterTable table = two_rows(rank, rank);
    release_others(table, kHooks.why);
    const auto values = gather(table, boxes.ranks(), boxes[rank], kPatience);
    ASSERT_EQ(values.size(), 2);
    EXPECT_TRUE(at::equal(values[0], at::full({4}, 0, at::kDouble)));
    EXPECT_FALSE(values[0].requires_grad());
    EXPECT_TRUE(at::equal(values[1], at::full({2, 3}, 1.0)));
  });
  for (const auto& error : errors) EXPECT_EQ(error, nullptr);
}

TEST(Values, OfAnyNumberAreGatheredAPortionAtATimeToAllOrToTheFirstAlone) {
  for (const bool to_first : {false, true}) {
    messaging::Mailboxes boxes(3, 1);
    const auto errors = boxes.run([&](int rank) {
      std::vector<NamedValue> own;  // none on the first rank, and three portions on the last
      for (int i = 0; i < rank * 3; ++i) own.emplace_back(base::str(rank, i), at::full({4}, i, at::kDouble));
      own.emplace_back(base::str(rank, "-extra"), std::string("object"));
      const auto all = gather(std::move(own), to_first, boxes.ranks(), boxes[rank], kPatience, /*portion_bytes=*/64);
      std::string names;
      for (const auto& [name, part] : all) names += name + " ";
      EXPECT_EQ(names, to_first && rank > 0 ? "" : "0-extra 10 11 12 1-extra 20 21 22 23 24 25 2-extra ");
      if (names.empty()) return;
      EXPECT_TRUE(at::equal(all[9].second.as<at::Tensor>(), at::full({4}, 4, at::kDouble)));
      EXPECT_EQ(all.back().second.as<std::string>(), "object");
    });
    for (const auto& error : errors) EXPECT_EQ(error, nullptr);
  }
}

// Ctrl-C comes to the last rank before it has sent its part, and to the first while it waits for that.
TEST(Values, SentForAGatheringThatWasInterruptedAreNotTakenForTheNextOne) {
  messaging::Mailboxes boxes(3, 1);
  std::atomic<bool> last_is_out = false, middle_is_out = false;
  const auto errors = boxes.run([&](int rank) {
    const auto gather_of = [&](double value, const std::function<void()>& check_interrupt) {
      std::vector<NamedValue> own;
      for (const auto* name : {"a", "b"}) own.emplace_back(base::str(rank, name), at::full({4}, value));
      const base::Patience patience{kPatience.timeout, check_interrupt};
      return gather(std::move(own), /*to_first=*/true, boxes.ranks(), boxes[rank], patience, /*portion_bytes=*/1);
    };
    const auto interrupt = [] { throw base::CancelledError("Ctrl-C"); };
    if (rank == 0) {
      EXPECT_THROW(gather_of(1, [&] { middle_is_out ? interrupt() : void(); }), base::CancelledError);
    } else if (rank == 1) {
      while (!last_is_out) std::this_thread::yield();
      gather_of(1, nullptr);
      middle_is_out = true;
    } else {
      EXPECT_THROW(gather_of(1, interrupt), base::CancelledError);
      last_is_out = true;
    }
    std::string found;
    for (const auto& [name, part] : gather_of(2, nullptr)) {
      found += base::str(name, "=", part.as<at::Tensor>()[0].item<double>(), " ");
    }
    EXPECT_EQ(found, rank > 0 ? "" : "0a=2 0b=2 1a=2 1b=2 2a=2 2b=2 ");
  });
  for (const auto& error : errors) EXPECT_EQ(error, nullptr);
}

TEST(Values, OfAStateTravelInPortionsOfAboutSoManyBytes) {
  constexpr std::int64_t kName = 7;
  messaging::Mailboxes boxes(2, 1);
  const auto errors = boxes.run([&](int rank) {
    if (rank == 1) {
      std::vector<NamedValue> own;
      for (int i = 0; i < 7; ++i) own.emplace_back(base::str(i), at::full({4}, i, at::kDouble));
      gather(std::move(own), /*to_first=*/true, boxes.ranks(), boxes[1], kPatience, /*portion_bytes=*/64);
      return;
    }
    const value::Tuple said{{std::int64_t{0}, kName}};  // by gather() first: how many portions, and a name
    const auto counts = boxes[0].all_gather(boxes.ranks(), said, kPatience);
    ASSERT_EQ(counts[1].as<value::Tuple>().items.at(0).as<std::int64_t>(), 4);
    for (const std::size_t parts : {2, 2, 2, 1}) {
      const auto portion = boxes[0].receive(base::Rank(1), "state", kPatience).as<value::Tuple>();
      EXPECT_EQ(portion.items.at(0).as<std::int64_t>(), kName);
      EXPECT_EQ(portion.items.at(1).as<value::Dict>().items.size(), parts);
    }
  });
  for (const auto& error : errors) EXPECT_EQ(error, nullptr);
}

}  // namespace
}  // namespace lamina::model
