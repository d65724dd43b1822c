// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/causes.h"

#include <gtest/gtest.h>

namespace lamina::digests {
namespace {

Digest number(double value) {
  Digest digest{.dtype = "float64", .shape = {}, .elements = 1, .squares = value * value};
  for (int k = 0; k < kProjections; ++k) digest.projections[k] = value * sign_of(0, k);
  return digest;
}

// A call that has read these variables in the two runs.
class Causes : public testing::Test {
 protected:
  Causes() {
    difference_.seen = {.kind = RecordedKind::kOutput, .microbatch = 0, .name = "layer"};
    difference_.inputs_agree = true;
    first_.push_back({.rank = 1, .world = 2});
    second_.push_back({.rank = 0});
  }

  Reads& first() { return first_.front().reads[call_of(difference_.seen)]; }
  Reads& second() { return second_.front().reads[call_of(difference_.seen)]; }
  std::string apart() { return reads_apart(first_, second_, difference_, {call_of(difference_.seen)}, 1e-4); }

  std::vector<RankRecording> first_, second_;
  Difference difference_;
};

TEST_F(Causes, KnowsNothingOfWhatWasNotRecorded) { EXPECT_EQ(apart(), ""); }

TEST_F(Causes, NamesWhatHasOtherContents) {
  first().values = {{"a", "3"}, {"b", "#12"}, {"c", "1"}};
  second().values = {{"a", "2"}, {"b", "#13"}, {"c", "1"}};
  first().users["b"] = "layers.1 writes it";
  EXPECT_EQ(apart(), ": it reads a, which is 3 instead of 2, and b, which has other contents (layers.1 writes it)");
  second().values = first().values;
  EXPECT_EQ(apart(), "; what it was seen to read agrees");
  second().values.erase("c");
  EXPECT_EQ(apart(), ": it reads c, which only the first run has");
}

TEST_F(Causes, LetsNumbersDifferByRounding) {
  first().values = second().values = {{"a", "a number"}};
  first().tensors["a"] = {number(1 + 1e-9)};
  second().tensors["a"] = {number(1)};
  EXPECT_EQ(apart(), "; what it was seen to read agrees");
  first().tensors["a"] = {number(-1.5)};
  EXPECT_EQ(apart(), ": it reads a, which is -1.5 instead of 1");
}

TEST_F(Causes, ListsNoMoreThanAFew) {
  for (const char* name : {"a", "b", "c", "d", "e", "f", "g"}) first().values[name] = "1", second().values[name] = "2";
  EXPECT_NE(apart().find("e, which is 1 instead of 2, and 2 more"), std::string::npos) << apart();
}

TEST_F(Causes, LooksForOtherInputsAroundTheModule) {
  difference_.seen.name = "block.part.layer";
  using Calls = std::vector<CallName>;
  EXPECT_EQ(calls_to_look_at(difference_, second_), Calls{call_of(difference_.seen)});
  difference_.inputs_agree = false;
  EXPECT_TRUE(calls_to_look_at(difference_, second_).empty());
  difference_.seen.kind = RecordedKind::kInput;
  const CallName block{0, 0, "block", 0};
  second_.front().calls[block] = {};
  EXPECT_EQ(calls_to_look_at(difference_, second_), Calls{block});
  first_.front().reads[block].values["a"] = "1";
  second_.front().reads[block].values["a"] = "2";
  EXPECT_EQ(reads_apart(first_, second_, difference_, {block}, 1e-4),
            ", in the code of block: it reads a, which is 1 instead of 2");
}

TEST_F(Causes, LooksForAGradientInWhatTookTheOutput) {
  difference_.seen = {.kind = RecordedKind::kOutputGradient, .microbatch = 0, .name = "one"};
  const CallName model{0, 0, "", 0}, taker{0, 0, "two", 0}, within{0, 0, "two.part", 0};
  auto& rank = second_.front();
  rank.calls[model] = {};
  rank.seen.push_back({.kind = RecordedKind::kOutput, .microbatch = 0, .name = "one", .digest = number(3)});
  for (const char* name : {"two", "two.part"})
    rank.seen.push_back({.kind = RecordedKind::kInput, .microbatch = 0, .name = name, .digest = number(3)});
  rank.seen.push_back({.kind = RecordedKind::kInput, .microbatch = 0, .name = "other", .digest = number(4)});
  const auto calls = calls_to_look_at(difference_, second_);
  EXPECT_EQ(calls, (std::vector{within, taker, model}));
  first_.front().reads[taker].values["a"] = first_.front().reads[within].values["a"] = "1";
  rank.reads[taker].values["a"] = "2", rank.reads[within].values["a"] = "1";
  EXPECT_EQ(reads_apart(first_, second_, difference_, calls, 1e-4),
            ", in the code of two: it reads a, which is 1 instead of 2");
  rank.reads[taker].values["a"] = "1";
  EXPECT_EQ(reads_apart(first_, second_, difference_, calls, 1e-4),
            "; what the modules after it were seen to read agrees");
}

TEST_F(Causes, LooksForAParametersGradientInItsModuleAndForItsUpdateInOptions) {
  difference_.seen = {.kind = RecordedKind::kGradient, .name = "layer.weight"};
  const CallName layer{0, 1, "layer", 0}, update{0, -1, "layer.weight", 0};
  second_.front().calls[layer] = {};
  EXPECT_EQ(calls_to_look_at(difference_, second_), std::vector{layer});
  for (const RecordedKind kind : {RecordedKind::kParameter, RecordedKind::kState}) {
    difference_.seen.kind = kind;
    difference_.seen.name = kind == RecordedKind::kState ? "layer.weight exp_avg" : "layer.weight";
    EXPECT_EQ(calls_to_look_at(difference_, second_), std::vector{update});
  }
  first_.front().reads[update].values["lr"] = "0.1";
  second_.front().reads[update].values["lr"] = "0.2";
  EXPECT_EQ(reads_apart(first_, second_, difference_, {update}, 1e-4),
            ": its update took lr, which is 0.1 instead of 0.2");
}

TEST_F(Causes, SaysWhatIsMissingOfARun) {
  first_.front().steps = 1;
  EXPECT_EQ(gaps(first_, "first run"),
            (std::vector<std::string>{"first run: the recording of rank 1 breaks off after 1 step",
                                      "first run: there is no recording of rank 0"}));
  second_.front().ended = true;
  EXPECT_TRUE(gaps(second_, "second run").empty());
}

}  // namespace
}  // namespace lamina::digests
