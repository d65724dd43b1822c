// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/live_values.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "lamina/base/error.h"
#include "lamina/value/reference_tensor.h"
#include "tests/message_of.h"

namespace lamina::sharding {
namespace {

// Has all values itself, and counts how often they come.
class Kept : public Transfer {
 public:
  explicit Kept(std::vector<at::Tensor> values) : values_(std::move(values)), came(values_.size()) {}
  at::Tensor shard(std::size_t parameter) override { return values_[parameter]; }
  std::vector<c10::DataPtr> values(std::span<const std::size_t> parameters) override {
    ++gathers;
    std::vector<c10::DataPtr> all;
    for (const auto parameter : parameters) {
      if (fails == parameter) throw base::TimeoutError("gathering parameters: no answer");
      ++came[parameter];
      all.push_back(value::memory_that_keeps(values_[parameter].clone()));
    }
    return all;
  }
  void expect(std::span<const std::size_t> parameters) override {
    expected.insert(expected.end(), parameters.begin(), parameters.end());
  }
  at::Tensor copy(std::size_t parameter) override { return values_[parameter].clone().view({-1}); }
  void give(std::size_t, at::Tensor, std::int64_t) override {}
  void reduce(std::int64_t, const base::Patience&) override {}
  at::Tensor take_sum(std::size_t) override { return {}; }
  void abandon(const value::Failure& /*failure*/) override {}

 private:
  std::vector<at::Tensor> values_;

 public:
  std::vector<int> came;
  std::vector<std::size_t> expected;
  int gathers = 0;
  std::optional<std::size_t> fails;  // whose value does not come
};

class LiveValuesTest : public ::testing::Test {
 protected:
  // `rows` of three elements each.
  void make(std::int64_t most_at_once = 1000, std::int64_t rows = 2) { make(Keeping{most_at_once}, rows); }
  void make(Keeping keeping, std::int64_t rows = 2) {
    std::vector<ShardedParameter> named;
    std::vector<at::Tensor> values;
    for (const auto* name : {"a.weight", "b.weight", "b.inner.weight", "c.weight"}) {
      parameters.push_back(at::full({rows, 3}, static_cast<double>(named.size() + 1)).set_requires_grad(true));
      values.push_back(parameters.back().detach().clone());
      named.push_back({name, parameters.back()});
    }
    transfer = std::make_shared<Kept>(std::move(values));
    const std::vector<std::string> modules{"", "a", "b", "c"};  // not b.inner
    live = std::make_shared<LiveValues>(std::move(named), modules, keeping, transfer);
    value::set_home(live);
    for (std::size_t i = 0; i < parameters.size(); ++i) live->send_away(i);
  }

  bool is_here(std::size_t parameter) const { return !value::is_away(parameters[parameter]); }
  static model::ModuleCall call(const std::string& name) { return {base::ModuleId(0), name}; }
  template <class Work>
  void forward(const std::string& name, const Work& work) {
    live->before_forward(call(name));
    work();
    live->after_forward(call(name));
  }
  template <class Work>
  void backward(const std::string& name, const Work& work, bool creates_graph = false) {
    const c10::AutoGradMode as_the_engine(creates_graph);
    live->before_backward(call(name));
    work();
    live->after_backward(call(name));
  }

  std::vector<at::Tensor> parameters;
  std::shared_ptr<Kept> transfer;
  std::shared_ptr<LiveValues> live;
};

TEST_F(LiveValuesTest, ValuesAreHereForCallsOfTheirModules) {
  make();
  EXPECT_EQ(live->units(), (std::vector<std::string>{"", "a", "b", "c"}));
  forward("b", [&] {
    EXPECT_TRUE(is_here(1) && is_here(2)) << "that of a module in it that is never called, too";
    EXPECT_FALSE(is_here(0) || is_here(3));
    EXPECT_TRUE(at::equal(parameters[1].detach(), at::full({2, 3}, 2.)));
    EXPECT_EQ(live->live(), 12);
    EXPECT_EQ(transfer->gathers, 1) << "what a unit needs comes at once";
  });
  EXPECT_FALSE(is_here(1) || is_here(2));
  EXPECT_EQ(live->live(), 0);
  EXPECT_EQ(live->most_live(), 12);
}

TEST_F(LiveValuesTest, AUseOfAValueThatIsAwaySaysWhichAndWhatToDo) {
  make();
  const auto text = message_of<base::UsageError>([&] { parameters[0] + 1; });
  EXPECT_NE(text.find("a.weight is sharded"), std::string::npos) << text;
  EXPECT_NE(text.find("get_full_parameter"), std::string::npos) << text;
  EXPECT_NE(text.find("(aten::add"), std::string::npos) << text;
  EXPECT_THROW(parameters[0].data_ptr(), c10::Error);
  EXPECT_EQ(parameters[0].sizes(), (std::vector<std::int64_t>{2, 3})) << "what needs no value is there";
  EXPECT_TRUE(parameters[0].requires_grad());
  EXPECT_TRUE(at::equal(at::full_like(parameters[0], 2), at::full({2, 3}, 2.)));
  EXPECT_EQ(parameters[0].new_zeros({4}).numel(), 4);
  EXPECT_FALSE(is_here(0));
}

TEST_F(LiveValuesTest, ViewsGoAndComeWithTheirTensor) {
  make();
  at::Tensor view;
  forward("a", [&] { view = parameters[0].detach().t(); });
  EXPECT_THROW(view.sum(), c10::Error);
  backward("a", [&] { EXPECT_EQ(view.sum().item<double>(), 6); });
  EXPECT_THROW(view.sum(), c10::Error);
}

TEST_F(LiveValuesTest, AGraphThatSavedAValueFindsItInItsBackward) {
  make();
  at::Tensor loss;
  const auto version = value::version_of(parameters[0]);
  const auto x = at::ones({4, 3}).set_requires_grad(true);
  forward("a", [&] { loss = at::linear(x, parameters[0]).sum(); });
  backward("a", [&] { torch::autograd::backward({loss}, {}); });
  EXPECT_TRUE(at::equal(x.grad(), at::full({4, 3}, 2.)));
  EXPECT_EQ(value::version_of(parameters[0]), version);
}

TEST_F(LiveValuesTest, AfterInferenceModeItIsTrainedAsBefore) {
  make();
  {
    const c10::InferenceMode evaluating;
    forward("a", [&] { EXPECT_EQ(parameters[0].sum().item<double>(), 6); });
  }
  at::Tensor loss;
  forward("a", [&] { loss = (parameters[0] * 2).sum(); });
  backward("a", [&] { torch::autograd::backward({loss}, {}); });
  EXPECT_TRUE(at::equal(parameters[0].grad(), at::full({2, 3}, 2.)));
}

TEST_F(LiveValuesTest, WhatAnotherModuleReadsComesAndIsItsFromThenOn) {
  make();
  forward("c", [&] { EXPECT_EQ(parameters[0].sum().item<double>(), 6); });
  EXPECT_FALSE(is_here(0));
  backward("c", [&] { EXPECT_TRUE(is_here(0) && is_here(3)); });
  forward("c", [&] { EXPECT_TRUE(is_here(0)); });
}

TEST_F(LiveValuesTest, CallsMayBeInOneAnother) {
  make();
  forward("", [&] {
    forward("a", [&] { forward("a", [&] { EXPECT_TRUE(is_here(0)); }); });
    EXPECT_FALSE(is_here(0));
    EXPECT_EQ(parameters[3].sum().item<double>(), 24);
    forward("c", [] {});
    EXPECT_TRUE(is_here(3)) << "the whole model still reads it";
  });
  EXPECT_FALSE(is_here(3));
}

TEST_F(LiveValuesTest, AWriteToAWholeValueIsAnError) {
  make();
  live->before_forward(call("a"));
  parameters[0].detach().add_(1);
  const auto text = message_of<base::UsageError>([&] { live->after_forward(call("a")); });
  EXPECT_NE(text.find("a.weight was written to"), std::string::npos) << text;
  EXPECT_FALSE(is_here(0));
}

TEST_F(LiveValuesTest, AGraphOfABackwardFindsValuesUntilThePassEnds) {
  make();
  at::Tensor view;
  forward("a", [&] { view = parameters[0].detach().t(); });
  backward("a", [] {}, /*creates_graph=*/true);
  EXPECT_EQ(view.sum().item<double>(), 6);
  live->end_pass();
  EXPECT_FALSE(is_here(0));
  backward("a", [] {});
  live->end_pass();
  EXPECT_FALSE(is_here(0)) << "no more was held than let go";
}

TEST_F(LiveValuesTest, ALentValueMayBeWritten) {
  make();
  live->lend(1);
  EXPECT_THROW(live->lend(1), base::UsageError);
  parameters[1].detach().add_(1);
  EXPECT_EQ(parameters[1].sum().item<double>(), 18);
  live->take_back(1);
  EXPECT_FALSE(is_here(1));
  forward("b", [&] { EXPECT_EQ(parameters[1].sum().item<double>(), 12) << "who lends writes it back"; });
}

TEST_F(LiveValuesTest, AnUpdateFindsNothingHeldForGraphsThatArePast) {
  make();
  backward("a", [] {}, /*creates_graph=*/true);  // of torch.autograd.grad(), after which no pass ends
  live->before_backward(call("b"));              // fails, and its graph stays
  live->before_update();
  EXPECT_EQ(live->live(), 0);
  parameters[0].unsafeGetTensorImpl()->bump_version();
  EXPECT_NO_THROW(live->end_pass()) << "the update wrote, nobody else";
  live->after_backward(call("b"));
  EXPECT_EQ(live->live(), 0);
}

TEST_F(LiveValuesTest, AnUpdateOfWhatIsInUseIsRefused) {
  make();
  live->hold(1);
  const auto text = message_of<base::UsageError>([&] { live->before_update(); });
  EXPECT_NE(text.find("b.weight is to change while"), std::string::npos) << text;
  live->let_go(1);
  EXPECT_NO_THROW(live->before_update());
}

TEST_F(LiveValuesTest, WhereAValueDoesNotComeNoneIsHeld) {
  make();
  transfer->fails = 2;
  EXPECT_THROW(live->before_forward(call("b")), base::TimeoutError);
  EXPECT_THROW(live->before_backward(call("b")), base::TimeoutError);
  EXPECT_EQ(live->live(), 0);
  transfer->fails = {};
  forward("b", [&] { EXPECT_TRUE(is_here(1) && is_here(2)); });
  EXPECT_EQ(live->live(), 0);
}

// The order of a pass: forwards of a, b, c, and backwards of c, b, a.
class InOrder : public LiveValuesTest {
 protected:
  void pass() {
    for (const auto* name : {"a", "b", "c"}) forward(name, [] {});
    for (const auto* name : {"c", "b", "a"}) backward(name, [] {});
    live->end_pass();
  }
};

TEST_F(InOrder, WhatTheNextUnitNeedsComesMeanwhileOrStays) {
  make(std::int64_t{1} << 30, 3 << 20);
  pass();
  EXPECT_EQ(transfer->came, (std::vector<int>{2, 2, 2, 2})) << "the order is not known yet";
  EXPECT_TRUE(transfer->expected.empty());
  pass();
  EXPECT_EQ(transfer->came, (std::vector<int>{4, 4, 4, 3})) << "c is needed again at once";
  EXPECT_EQ(transfer->expected, (std::vector<std::size_t>{1, 2, 3, 1, 2, 0}));
  EXPECT_EQ(live->live(), 0);
}

TEST_F(InOrder, AValueThatStayedMayBeLent) {
  make();
  pass();
  for (const auto* name : {"a", "b", "c"}) forward(name, [] {});
  ASSERT_TRUE(is_here(3)) << "its backward is next";
  const auto before = live->live();
  live->lend(3);
  EXPECT_EQ(live->live(), before);
  live->take_back(3);
  EXPECT_EQ(live->live(), before - 6);
  forward("c", [&] { EXPECT_EQ(parameters[3].sum().item<double>(), 24); });
}

TEST_F(InOrder, SeveralSmallUnitsComeMeanwhileOrStay) {
  make();
  pass();
  live->before_forward(call("a"));
  EXPECT_EQ(transfer->expected, (std::vector<std::size_t>{1, 2, 3, 3, 1, 2}));
  live->after_forward(call("a"));
  live->end_pass();
  pass();
  pass();
  EXPECT_EQ(transfer->came, (std::vector<int>{6, 5, 5, 5})) << "what its forward has had its backward has";
  EXPECT_EQ(live->live(), 0);
}

TEST_F(InOrder, ALimitPausesThatButNothingThatIsNeeded) {
  make(1);
  pass();
  pass();
  EXPECT_TRUE(transfer->expected.empty());
  EXPECT_EQ(transfer->came, (std::vector<int>{4, 4, 4, 4}));
  EXPECT_EQ(live->most_live(), 12) << "b needs as many";
}

// Other members may have come farther in it, or less far.
TEST_F(InOrder, OfAPassThatFailedNothingStaysOrIsKnown) {
  make(std::int64_t{1} << 30, 3 << 20);
  pass();
  transfer->expected.clear();
  pass();
  const auto expected = std::exchange(transfer->expected, {});
  forward("b", [&] { EXPECT_EQ((parameters[0] + 1).numel(), 3 * (3 << 20)); });  // of another module, and out of order
  live->before_backward(call("c"));
  live->leave_pass();
  EXPECT_EQ(live->live(), 0);
  transfer->expected.clear();
  pass();
  EXPECT_EQ(transfer->expected, expected);
  forward("b", [&] { EXPECT_FALSE(is_here(0)); });
}

using Until = Keeping::Until;
using Expect = Keeping::Expect;

TEST_F(InOrder, AValueMayStayUntilItsBackwardHasEnded) {
  make(Keeping{1000, Until::kBackward});
  for (const auto* name : {"a", "b", "c"}) forward(name, [] {});
  EXPECT_EQ(live->live(), 24);
  backward("c", [] {});
  backward("b", [&] {
    const c10::AutoGradMode computed_again(true);
    forward("b", [] {});
  });
  EXPECT_EQ(live->live(), 6) << "that of a";
  live->end_pass();
  EXPECT_EQ(live->live(), 0);
  pass();
  pass();
  EXPECT_EQ(transfer->came, (std::vector<int>{3, 3, 3, 3})) << "once in each pass";
}

TEST_F(InOrder, WithoutGradientsItGoesAfterTheCallOfTheModel) {
  make(Keeping{1000, Until::kBackward});
  const c10::AutoGradMode evaluating(false);
  forward("", [&] {
    for (const auto* name : {"a", "b"}) forward(name, [] {});
    EXPECT_EQ(live->live(), 18);
  });
  EXPECT_EQ(live->live(), 0);
}

TEST_F(InOrder, AValueMayStayUntilTheUpdate) {
  make(Keeping{1000, Until::kUpdate});
  pass();
  pass();
  forward("a", [] {});
  live->hold(1);
  EXPECT_THROW(live->before_update(), base::UsageError) << "it is in use";
  live->let_go(1);
  EXPECT_EQ(transfer->came, (std::vector<int>{1, 1, 1, 1}));
  live->before_update();
  EXPECT_EQ(live->live(), 0);
  for (const auto& each : parameters) each.unsafeGetTensorImpl()->bump_version();
  pass();
  EXPECT_EQ(live->live(), 24);
  live->leave_pass();
  EXPECT_EQ(live->live(), 0) << "other members may have others";
}

TEST_F(InOrder, OfTooManyTheOldestGo) {
  make(Keeping{18, Until::kBackward});
  for (const auto* name : {"a", "b", "c"}) forward(name, [] {});
  EXPECT_FALSE(is_here(0)) << "its backward is the last";
  EXPECT_EQ(live->live(), 18);
  for (const auto* name : {"c", "b", "a"}) backward(name, [] {});
  EXPECT_EQ(transfer->came, (std::vector<int>{2, 1, 1, 1}));
  EXPECT_EQ(live->most_live(), 18);
}

TEST_F(InOrder, AWriteToAValueThatStaysIsAnError) {
  make(Keeping{1000, Until::kUpdate});
  pass();
  parameters[3].detach().add_(1);
  const auto text = message_of<base::UsageError>([&] { live->before_update(); });
  EXPECT_NE(text.find("c.weight was written to"), std::string::npos) << text;
  EXPECT_EQ(live->live(), 0);
}

TEST_F(InOrder, TheNextBackwardIsExpectedBeforeThisOneAfterItOrNever) {
  for (const auto expect : {Expect::kBeforeBackward, Expect::kAfterBackward, Expect::kNever}) {
    parameters.clear();
    make(Keeping{std::int64_t{1} << 30, Until::kForward, expect}, 3 << 20);  // one unit is all that comes ahead
    pass();
    const auto expected = [&](const auto& work) {
      transfer->expected.clear();
      work();
      return transfer->expected;
    };
    using Numbers = std::vector<std::size_t>;
    EXPECT_EQ(expected([&] { live->before_forward(call("a")); }), (Numbers{1, 2}));
    live->after_forward(call("a"));
    for (const auto* name : {"b", "c"}) forward(name, [] {});
    const bool before = expect == Expect::kBeforeBackward, after = expect == Expect::kAfterBackward;
    EXPECT_EQ(expected([&] { live->before_backward(call("c")); }), before ? Numbers({1, 2}) : Numbers());
    EXPECT_EQ(expected([&] { live->after_backward(call("c")); }), after ? Numbers({1, 2}) : Numbers());
    live->leave_pass();
  }
}

TEST_F(InOrder, AnotherOrderIsNoError) {
  make();
  pass();
  for (const auto* name : {"c", "c", "a"}) forward(name, [] {});
  for (const auto* name : {"b", "a"}) backward(name, [] {});
  live->end_pass();
  EXPECT_EQ(live->live(), 0);
  pass();
  pass();
  EXPECT_EQ(live->live(), 0);
}

}  // namespace
}  // namespace lamina::sharding
