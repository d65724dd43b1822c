// SPDX-License-Identifier: Apache-2.0
#include "lamina/digests/comparison.h"

#include <gtest/gtest.h>

#include <cmath>

#include "lamina/base/error.h"

namespace lamina::digests {
namespace {

// The digest of these numbers, or of a part of them.
Digest digest_of(const std::vector<double>& all, std::int64_t begin = 0, std::int64_t end = -1) {
  if (end < 0) end = static_cast<std::int64_t>(all.size());
  Digest digest{.dtype = "float64", .shape = {static_cast<std::int64_t>(all.size())}, .begin = begin};
  for (std::int64_t i = begin; i < end; ++i) {
    ++digest.elements;
    digest.squares += all[i] * all[i];
    digest.largest = std::max(digest.largest, std::abs(all[i]));
    for (int k = 0; k < kProjections; ++k) {
      digest.projections[k] += all[i] * sign_of(i, k);
    }
  }
  return digest;
}

class Runs : public testing::Test {
 protected:
  // Two ranks with a module each, and one with both.
  Runs() {
    for (int rank = 0; rank < 2; ++rank) first_.push_back({.rank = rank, .world = 2, .partition = rank});
    second_.push_back({.rank = 0, .world = 1});
    for (int module = 0; module < 2; ++module) {
      const std::string name = "layers." + std::to_string(module);
      add(first_.at(module), name, module);
      add(second_.front(), name, module);
    }
  }

  void add(RankRecording& rank, const std::string& name, int module) {
    const std::int64_t order = 10 * module;
    rank.seen.push_back({RecordedKind::kInput, 0, 0, name, 0, 0, order, digest_of({1, 2, 3.0 + module})});
    rank.seen.push_back({RecordedKind::kOutput, 0, 0, name, 0, 0, order + 1, digest_of({1, 2, 4.0 + module})});
    rank.seen.push_back({RecordedKind::kOutputGradient, 0, 0, name, 0, 0, 100 - order, digest_of({0.5, 1, 0.25})});
    rank.seen.push_back({RecordedKind::kParameter, -1, -1, name + ".weight", 0, 0, 0, digest_of({1, 1, 1, 1})});
    rank.seen.push_back({RecordedKind::kGradient, 0, -1, name + ".weight", 0, 0, 200, digest_of({1, 2, 3, 4})});
    rank.seen.push_back(
        {RecordedKind::kParameter, 0, -1, name + ".weight", 0, 0, 300, digest_of({0.9, 0.8, 0.7, 0.6})});
    rank.calls[call_of(rank.seen.at(rank.seen.size() - 5))] = {"gradients", 7, false};
  }

  Seen& find(std::vector<RankRecording>& run, RecordedKind kind, const std::string& name) {
    for (auto& rank : run) {
      for (auto& seen : rank.seen) {
        if (seen.kind == kind && seen.name == name && seen.step >= 0) return seen;
      }
    }
    throw base::InternalError("no such tensor");
  }

  Comparison compared(const ComparisonOptions& options = {}) { return compare(first_, second_, options); }

  std::vector<RankRecording> first_, second_;
};

TEST_F(Runs, SayWhatOneOfThemLacks) {
  EXPECT_TRUE(compare(first_, second_, {}).missing.empty());
  auto& seen = first_.back().seen;
  std::erase_if(seen, [](const Seen& each) { return each.name == "layers.1.weight"; });
  first_.back().steps = first_.front().steps = second_.front().steps = 1;
  EXPECT_EQ(compare(first_, second_, {}).missing,
            (std::vector<std::string>{"first run: there is no gradient of layers.1.weight that can be compared",
                                      "first run: there is no parameter layers.1.weight that can be compared"}));
}

TEST_F(Runs, SayWhichModuleOneOfThemHasNotCalled) {
  first_.back().steps = first_.front().steps = second_.front().steps = 1;
  std::erase_if(second_.front().seen, [](const Seen& each) { return each.name == "layers.1"; });
  EXPECT_EQ(compare(first_, second_, {}).missing,
            std::vector<std::string>{"second run: there is no call of layers.1 that can be compared"});
}

TEST_F(Runs, SaysWhatWasComparedWhereAllIsEqual) {
  const auto found = compared();
  EXPECT_TRUE(found.differences.empty());
  EXPECT_EQ(std::tuple(found.steps, found.tensors, found.modules, found.parameters), std::tuple(1, 12, 2, 2));
  EXPECT_EQ(describe(found).substr(0, 6), "equal ");
}

TEST_F(Runs, TellsTheFirstInTheOrderOfTheComputation) {
  find(first_, RecordedKind::kInput, "layers.1").digest = digest_of({1, 2, 4.1});
  find(first_, RecordedKind::kOutput, "layers.1").digest = digest_of({1, 2, 5.1});
  find(first_, RecordedKind::kOutput, "layers.0").digest = digest_of({1, 2, 4.1});
  find(first_, RecordedKind::kGradient, "layers.0.weight").digest = digest_of({1, 2, 3, 4.1});
  const auto found = compared();
  ASSERT_EQ(found.differences.size(), 4U);
  const auto& first = found.differences.front();
  EXPECT_EQ(named(first.seen), "output of layers.0");
  EXPECT_TRUE(first.inputs_agree);
  EXPECT_EQ(first.rank, 0);
  EXPECT_NEAR(first.relative, 0.1 / std::sqrt(1 + 4 + 4.1 * 4.1), 0.01);
  EXPECT_TRUE(describe(found).starts_with(
      "step 0, microbatch 0: output of layers.0 on rank 0 differs by 2e-02 (inputs agree)\n"));
  EXPECT_EQ(named(found.differences.back().seen), "gradient of layers.0.weight");
}

TEST_F(Runs, SaysThatModesOrRandomNumbersDiffer) {
  find(first_, RecordedKind::kOutput, "layers.1").digest = digest_of({1, 2, 5.1});
  auto& call = first_.at(1).calls.begin()->second;
  auto& other = second_.front().calls.at(first_.at(1).calls.begin()->first);
  call.drew = other.drew = true;
  EXPECT_EQ(describe(compared()).find("random numbers"), std::string::npos);
  call.generator = 8;
  EXPECT_NE(describe(compared()).find("random numbers, and they began at another place"), std::string::npos);
  other.drew = false;
  EXPECT_NE(describe(compared()).find("random numbers, which it does not in the second run"), std::string::npos);
  call.modes = "no gradients";
  EXPECT_NE(describe(compared()).find("ran with no gradients instead of gradients"), std::string::npos);
}

TEST_F(Runs, TellsOfOtherDataAsThat) {
  const Seen input{.kind = RecordedKind::kInput, .microbatch = 0, .order = -1, .digest = digest_of({1, 2})};
  first_.front().seen.push_back(input);
  second_.front().seen.push_back(input);
  first_.front().seen.back().digest = digest_of({1, 3});
  EXPECT_TRUE(
      describe(compared())
          .starts_with("step 0, microbatch 0: the runs read different data: input of the model on rank 0 differs by "));
}

TEST_F(Runs, SaysThatThereAreFewerSteps) {
  EXPECT_NE(describe(compared({.steps = 3})).find(": 1 of 3 steps: the script ended; 12 tensors"), std::string::npos);
}

TEST_F(Runs, PutsPartsTogetherWhereverTheyLie) {
  auto& whole = find(first_, RecordedKind::kParameter, "layers.0.weight");
  const Seen other = whole;
  const std::vector<double> all{0.9, 0.8, 0.7, 0.6};
  whole.digest = digest_of(all, 0, 3);
  first_.at(1).copy = 1;  // shards lie in several copies
  first_.at(1).seen.push_back(other);
  first_.at(1).seen.back().digest = digest_of(all, 3, 4);
  EXPECT_TRUE(compared().differences.empty());
  first_.at(1).seen.back().digest = digest_of({0.9, 0.8, 0.7, -0.6}, 3, 4);
  const auto found = compared();
  ASSERT_EQ(found.differences.size(), 1U);
  EXPECT_EQ(named(found.differences.front().seen), "parameter layers.0.weight");
}

TEST_F(Runs, FindsWhatIsLeftOutDoubledOrOfAnotherSign) {
  for (const auto& other : {std::vector<double>{0, 0, 0}, {1, 2, 0.5}, {-0.5, 1, 0.25}, {1, 0.5, 0.25}}) {
    find(first_, RecordedKind::kOutputGradient, "layers.0").digest = digest_of(other);
    EXPECT_EQ(compared().differences.size(), 1U);
  }
}

TEST_F(Runs, ToleratesWhatRoundingExplains) {
  find(first_, RecordedKind::kOutput, "layers.0").digest = digest_of({1, 2, 4 + 1e-12});
  EXPECT_TRUE(compared().differences.empty());
  EXPECT_GT(compared().largest, 0);
  find(first_, RecordedKind::kOutput, "layers.0").digest = digest_of({1, 2, 4 + 1e-7});
  EXPECT_EQ(compared().differences.size(), 1U);
  EXPECT_TRUE(compared({.tolerance = 1e-6}).differences.empty());
}

TEST_F(Runs, ComparesBitsWhereAsked) {
  find(first_, RecordedKind::kOutput, "layers.0").digest.bits = 5;
  EXPECT_TRUE(compared().differences.empty());
  EXPECT_EQ(compared({.bits = true}).differences.size(), 1U);
}

TEST_F(Runs, FindsOtherShapesDtypesAndWhatIsNotFinite) {
  auto& digest = find(first_, RecordedKind::kOutput, "layers.0").digest;
  const Digest right = digest;
  digest.shape = {3, 1};
  EXPECT_EQ(compared().differences.front().what, "has shape [3, 1] instead of [3]");
  digest = right, digest.dtype = "float32";
  EXPECT_EQ(compared().differences.front().what, "is float32 instead of float64");
  digest = right, digest.not_finite = 2;
  EXPECT_EQ(compared().differences.front().what, "has 2 elements that are not finite instead of 0");
}

TEST_F(Runs, TakesElementsOfAGradientThatAreRoundingForWhatTheyAre) {
  const std::vector<double> gradient{1, 2, 3, 1e-17};
  for (auto* run : {&first_, &second_}) {
    auto& digest = find(*run, RecordedKind::kGradient, "layers.0.weight").digest;
    digest = digest_of(gradient);
    digest.small = 1;
  }
  find(first_, RecordedKind::kParameter, "layers.0.weight").digest = digest_of({0.9, 0.9, 0.9, 0.95});
  find(second_, RecordedKind::kParameter, "layers.0.weight").digest = digest_of({0.9, 0.9, 0.9, 1.1});
  EXPECT_TRUE(compared().differences.empty());
}

// Nothing says which of two calls that do not depend on each other comes first.
TEST_F(Runs, TakesCallsForThoseWithTheSameInputs) {
  for (int call = 0; call < 2; ++call) {
    for (auto* run : {&first_, &second_}) {
      const bool is_first = run == &first_;
      const std::int64_t number = is_first ? 1 - call : call;
      auto& rank = run->at(is_first ? call : 0);  // on any rank
      rank.seen.push_back({RecordedKind::kInput, 0, 0, "shared", number, 0, 50, digest_of({1, 2.0 + call})});
      rank.seen.push_back({RecordedKind::kOutput, 0, 0, "shared", number, 0, 51, digest_of({3, 4.0 + call})});
    }
  }
  EXPECT_TRUE(compared().differences.empty());
  find(first_, RecordedKind::kOutput, "shared").digest = digest_of({3, 4.5});
  const auto found = compared();
  ASSERT_EQ(found.differences.size(), 1U);
  EXPECT_EQ(named(found.differences.front().seen), "output of shared");
}

// Where a call goes to another rank, tensors of a cache are seen beside its arguments.
TEST_F(Runs, FindsInputsAmongOthers) {
  const auto mask = digest_of({1, 0, 1, 0});
  auto& rank = first_.front();
  rank.seen.push_back({RecordedKind::kInput, 0, 0, "layers.0", 0, 1, 0, digest_of({8, 8})});
  rank.seen.push_back({RecordedKind::kInput, 0, 0, "layers.0", 0, 2, 0, mask});
  second_.front().seen.push_back({RecordedKind::kInput, 0, 0, "layers.0", 0, 1, 0, mask});
  EXPECT_TRUE(compared().differences.empty());
  rank.seen.back().digest = digest_of({1, 1, 1, 0});
  EXPECT_FALSE(compared().differences.empty());
}

// As that of a bias before a softmax: an optimizer may make anything of it.
TEST_F(Runs, ToleratesWhatBecomesOfAParameterWhoseGradientIsRounding) {
  for (auto* run : {&first_, &second_}) {
    const double noise = run == &first_ ? 3e-12 : -2e-12;
    find(*run, RecordedKind::kGradient, "layers.0.weight").digest = digest_of({noise, noise, noise, -noise});
    const double other = run == &first_ ? 0.9 : 1.1;
    find(*run, RecordedKind::kParameter, "layers.0.weight").digest = digest_of({other, other, other, 2 - other});
  }
  EXPECT_TRUE(compared().differences.empty());
  find(first_, RecordedKind::kParameter, "layers.0.weight").digest = digest_of({3, 3, 3, 3});
  EXPECT_EQ(compared().differences.size(), 1U);
}

// The output of that bias's own module moves with it, and no other one does.
TEST_F(Runs, ToleratesWhatBecomesOfTheOutputOfSuchAParameter) {
  for (auto* run : {&first_, &second_}) {
    auto& seen = run->front().seen;
    const bool ours = run == &first_;
    seen.push_back({RecordedKind::kParameter, -1, -1, "layers.0.bias", 0, 0, 0, digest_of({0, 0, 0})});
    seen.push_back({RecordedKind::kGradient, 0, -1, "layers.0.bias", 0, 0, 200, digest_of({1e-16, -1e-16, 1e-16})});
    seen.push_back({RecordedKind::kParameter, 0, -1, "layers.0.bias", 0, 0, 300,
                    ours ? digest_of({0.01, -0.01, 0.01}) : digest_of({-0.01, 0.01, 0.01})});
    seen.push_back(
        {RecordedKind::kOutput, 1, 0, "layers.0", 0, 0, 401, ours ? digest_of({1.01, 2, 4}) : digest_of({1, 2, 4})});
    seen.push_back({RecordedKind::kOutput, 1, 0, "layers.2", 0, 0, 402, digest_of({1, 2, 4})});
  }
  EXPECT_EQ(describe(compared()).substr(0, 6), "equal ");
  first_.front().seen.back().digest = digest_of({1.01, 2, 4});
  const auto found = compared();
  ASSERT_EQ(found.differences.size(), 1U);
  EXPECT_EQ(found.differences.front().seen.name, "layers.2");
}

// An update by elements that are divided by their size: of the one that is rounding it may make anything.
TEST_F(Runs, ToleratesRoundingInStatesThatAreMadeOfUpdatesAlone) {
  const auto set = [this](const std::vector<double>& first, const std::vector<double>& second) {
    for (auto* run : {&first_, &second_}) {
      auto& gradient = find(*run, RecordedKind::kGradient, "layers.0.weight").digest;
      gradient = digest_of({1, 20, 3, 1e-17}), gradient.small = 1;
      auto& seen = run->front().seen;
      std::erase_if(seen, [](const Seen& each) { return each.kind == RecordedKind::kState; });
      seen.push_back({RecordedKind::kState, 0, -1, "layers.0.weight moved", 0, 0, 400,
                      digest_of(run == &first_ ? first : second)});
    }
    return compared().differences.size();
  };
  EXPECT_EQ(set({10, 10, 10, -10}, {10, 10, 10, 10}), 0U);
  EXPECT_EQ(set({30, 30, 30, -30}, {10, 10, 10, 10}), 1U);  // more than one element explains
  EXPECT_EQ(set({1, 20, 3, -3}, {1, 20, 3, 3}), 1U);        // no more alike than the gradient
}

// The variance of numbers that are all alike is what rounding left of them.
TEST_F(Runs, MeasuresBuffersByWhatWentIntoTheirModule) {
  const auto add_buffer = [this](double scale) {
    for (auto* run : {&first_, &second_}) {
      const double apart = run == &first_ ? 2 : 1;
      run->front().seen.push_back(
          {RecordedKind::kBuffer, 0, -1, "layers.0.running_var", 0, 0, 400, digest_of({scale * apart, scale})});
    }
    return compared().differences.size();
  };
  EXPECT_EQ(add_buffer(1e-30), 0U);
  for (auto* run : {&first_, &second_}) run->front().seen.pop_back();
  EXPECT_EQ(add_buffer(1e-3), 1U);
}

// One element went the other way, and all that comes after it is computed with that.
TEST_F(Runs, GoesOnFromParametersThatRoundingHasParted) {
  std::vector<double> one(4096, 1), gradient(4096, 1);
  for (auto* run : {&first_, &second_}) {
    auto& seen = run->front().seen;
    const auto weight = [&](int step) {
      return std::ranges::find_if(seen, [&](const Seen& each) {
        return each.kind == RecordedKind::kParameter && each.step == step && each.name == "layers.0.weight";
      });
    };
    weight(-1)->digest = digest_of(std::vector<double>(4096, 0.99));
    one[7] = run == &first_ ? 0.98 : 1;
    weight(0)->digest = digest_of(one);
    auto& digest = find(*run, RecordedKind::kGradient, "layers.0.weight").digest;
    digest = digest_of(gradient), digest.small = 1;
    const double apart = run == &first_ ? 1e-3 : 0;
    seen.push_back({RecordedKind::kOutput, 1, 0, "layers.0", 0, 0, 500, digest_of({1, 2 + apart})});
    seen.push_back({RecordedKind::kGradient, 1, -1, "layers.0.weight", 0, 0, 501, digest_of({1, 2 + 10 * apart})});
  }
  EXPECT_TRUE(compared().differences.empty());
  auto& output = first_.front().seen.at(first_.front().seen.size() - 2);
  output.digest = digest_of({1, 2.1});
  EXPECT_EQ(compared().differences.size(), 1U);
  output.digest = digest_of({1, 2});
  for (auto* run : {&first_, &second_}) find(*run, RecordedKind::kGradient, "layers.0.weight").digest.small = 0;
  EXPECT_EQ(compared().differences.size(), 2U);
}

// A part that a checkpoint runs again has the same inputs; it alone has a gradient.
TEST_F(Runs, TakesACallWithAGradientForOne) {
  for (auto* run : {&first_, &second_}) {
    const std::int64_t again = run == &first_ ? 1 : -1;
    auto& seen = run->front().seen;
    for (const std::int64_t call : {std::int64_t{0}, again}) {
      seen.push_back({RecordedKind::kInput, 0, 0, "shared", call, 0, 50, digest_of({1, 2})});
      seen.push_back({RecordedKind::kOutput, 0, 0, "shared", call, 0, 60, digest_of({3, 4})});
    }
    seen.push_back({RecordedKind::kOutputGradient, 0, 0, "shared", again, 0, 70, digest_of({1, 1})});
  }
  EXPECT_TRUE(compared().differences.empty());
}

TEST_F(Runs, RefusesRunsThatHaveNothingInCommon) {
  for (auto& rank : first_) rank.seen.clear();
  EXPECT_THROW(compared(), base::Error);
}

TEST_F(Runs, MatchesCallsWithTheSameInputsByTheirGradients) {
  const auto add_call = [](RankRecording& rank, std::int64_t call, double gradient) {
    rank.seen.push_back({RecordedKind::kInput, 0, 0, "shared", call, 0, 50 + call, digest_of({1, 2})});
    rank.seen.push_back({RecordedKind::kOutput, 0, 0, "shared", call, 0, 60 + call, digest_of({3, 4})});
    rank.seen.push_back({RecordedKind::kOutputGradient, 0, 0, "shared", call, 0, 70 + call, digest_of({gradient, 1})});
  };
  add_call(first_.front(), 0, -1);
  add_call(first_.front(), 1, 1);
  add_call(second_.front(), 0, 1);
  add_call(second_.front(), 1, -1);
  EXPECT_TRUE(compare(first_, second_, {}).differences.empty());
  add_call(first_.front(), 2, 5);
  add_call(second_.front(), 2, 7);
  ASSERT_EQ(compare(first_, second_, {}).differences.size(), 1);
}

}  // namespace
}  // namespace lamina::digests
