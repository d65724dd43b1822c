// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/batch_splitter.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

#include "lamina/base/coded.h"
#include "lamina/base/str.h"
#include "tests/usage_error.h"

namespace lamina::pipeline {
namespace {

using Remark = BatchSplitter::Remark;
using Cut = BatchSplitter::Cut;

constexpr SplitWords kWords{
    .shape = [](at::IntArrayRef sizes) { return base::str(sizes); },
    .whole = "keep it whole",
    .list = [](const std::string& argument) { return "say it of " + argument; },
    .offsets = "keep both whole",
    .rows = "say rows",
    .nothing = "say whole",
    .otherwise = "Otherwise: so",
    .tensor_row = "{} {}",
    .list_row = "{} ({} samples)",
    .whole_row = "{} (a list of {})",
};

// A batch in four microbatches, and what was decided of its lists before.
struct Batch {
  BatchSplitter splitter{4, false, kWords};
  KnownParts known;

  Batch& argument(const std::string& name, std::int64_t axis = 0, bool is_said = false) {
    splitter.begin_argument(name, axis, is_said);
    return *this;
  }
  Batch& tensor(const std::string& name, const at::Tensor& tensor) {
    argument(name).splitter.add_tensor(name, tensor);
    return *this;
  }
  Batch& names(const std::string& name, int count) {
    argument(name).splitter.begin_list(name, count, false);
    for (int i = 0; i < count; ++i) splitter.add_other(base::str(name, "[", i, "]"));
    splitter.end();
    return *this;
  }
  void decide() { splitter.decide(known); }
  std::string error() {
    return base::without_hints(usage_error_of([&] { decide(); }));
  }
};

TEST(BatchSplitter, RefusesWhatHasNoPiecesWithItsNameAndWhatToDo) {
  const auto refused = [](const std::function<void(BatchSplitter&)>& add) {
    Batch batch;
    add(batch.argument("b").splitter);
    return batch.error();
  };
  EXPECT_EQ(
      refused([](auto& batch) { batch.add_tensor("b[0]", at::eye(4).to_sparse_csr()); }),
      "argument b[0] is a tensor of the kind sparse_csr, which has no pieces: pass a dense one, or keep it whole");
  EXPECT_EQ(refused([](auto& batch) { batch.add_packed("b", "PackedSequence"); }),
            "argument b is a PackedSequence, which has no pieces: pass the padded tensor and the lengths and pack them "
            "in the step function, or keep it whole");
  EXPECT_EQ(refused([](auto& batch) { batch.add_read_once("b", "zip"); }),
            "argument b is a zip, which the first of 4 microbatches would use up: read a batch from it in the loop, "
            "and call the step function with its tensors [step-iterator]");
  const auto nested = at::_nested_tensor_from_tensor_list({at::ones({2}), at::ones({1})});
  EXPECT_NE(refused([&](auto& batch) { batch.add_tensor("b", nested); }).find("of the kind nested"), std::string::npos);
  Batch axis;
  axis.argument("b", 1).splitter.add_tensor("b", at::ones({4}));
  EXPECT_EQ(axis.error(), "argument b of shape [4] has no axis 1 to split it along");
}

TEST(BatchSplitter, RefusesWhatDoesNotFitWhatIsNotClearAndOffsets) {
  EXPECT_EQ(Batch().tensor("x", at::ones({12, 2})).tensor("w", at::ones({10})).error(),
            "argument w of shape [10] cannot be split into 4 microbatches: its size is a multiple of neither that "
            "number nor the size of argument x of shape [12, 2]. If each microbatch is to have all of it, keep it "
            "whole [step-uneven]");
  Batch pictures;
  pictures.argument("b").splitter.begin_list("b", 8, false);
  for (int i = 0; i < 8; ++i) pictures.splitter.add_tensor("b[]", at::ones({3, 4, 4}));
  pictures.splitter.end();
  EXPECT_EQ(pictures.error(),
            "it is not clear how argument b is cut: it may hold an element for each sample, or tensors with a row for "
            "each. say it of b [step-list]");
  const auto ends = at::tensor({0, 2, 2, 6});
  EXPECT_NE(Batch().tensor("x", at::ones({8})).tensor("y['offsets']", ends).error().find("[step-offsets]"),
            std::string::npos);
  EXPECT_EQ(Batch().tensor("x", at::ones({8})).tensor("y['classes']", ends).error(), "");
}

TEST(BatchSplitter, SaysHowEachValueIsCut) {
  Batch batch;
  batch.argument("b").splitter.begin_container("b");
  batch.splitter.add_tensor("b['x']", at::ones({6, 2}));
  batch.splitter.add_tensor("b['rate']", at::full({}, 1.0));
  batch.splitter.end();
  batch.names("names", 6).names("words", 5).argument("own").splitter.add_self_slicing("own", "Own");
  batch.decide();
  std::vector<Cut> cuts;
  for (std::size_t i = 0; i < 17; i = cuts.back() == Cut::kWithin ? i + 1 : batch.splitter.behind(i)) {
    cuts.push_back(batch.splitter.cut(i));
  }
  EXPECT_EQ(cuts, (std::vector{Cut::kWithin, Cut::kRows, Cut::kWhole, Cut::kElements, Cut::kWhole, Cut::kItself}));
  EXPECT_EQ(batch.splitter.pieces().samples(), (std::vector<std::int64_t>{2, 2, 1, 1}));
  EXPECT_EQ(batch.splitter.piece(1, base::Microbatch(1)).begin, 2);
}

TEST(BatchSplitter, SaysWhatIsSplitOnceForEachValueAndWhichListsOfTheBatchAreNot) {
  const auto x = at::ones({8, 3});
  Batch batch;
  batch.tensor("x", x).tensor("again", x).names("names", 8).argument("pair", 0, true).splitter.begin_list("pair", 8, 0);
  batch.splitter.end();
  batch.argument("own").splitter.add_self_slicing("own", "Own");
  batch.decide();
  EXPECT_EQ(batch.splitter.remarks(), std::vector{Remark::kSplit});
  EXPECT_EQ(batch.splitter.text(Remark::kSplit),
            "split into 4 microbatches: x [8, 3] along axis 0, names (8 samples) by elements, own (Own.smp_slice); "
            "whole to each: pair (a list of 8). Otherwise: so");
}

TEST(BatchSplitter, SaysWhereABatchIsTooSmallOrNothingIsSplit) {
  Batch small;
  small.tensor("x", at::ones({1})).decide();
  EXPECT_EQ(small.splitter.remarks(), std::vector{Remark::kFewer});
  Batch nothing;
  nothing.names("names", 4).decide();
  EXPECT_EQ(nothing.splitter.remarks(), std::vector{Remark::kNothing});
  EXPECT_NE(nothing.splitter.text(Remark::kNothing).find("each of 4 microbatches gets all"), std::string::npos);
  Batch empty;
  empty.decide();
  EXPECT_TRUE(empty.splitter.remarks().empty());
}

TEST(BatchSplitter, KnowsFromOneBatchHowListsOfTheNextAreCut) {
  KnownParts known;
  for (const std::int64_t rows : {8, 3, 1}) {
    BatchSplitter splitter(2, false, kWords);
    splitter.begin_argument("b", 0, false);
    splitter.begin_list("b", 3, false);
    for (int i = 0; i < 3; ++i) splitter.add_tensor("b[]", at::ones({rows, 5, 2}));
    splitter.end();
    splitter.decide(known);
    EXPECT_EQ(splitter.cut(0), Cut::kWithin);
    EXPECT_EQ(splitter.cut(1), Cut::kRows);
  }
}

}  // namespace
}  // namespace lamina::pipeline
