// SPDX-License-Identifier: Apache-2.0
// Outputs and gradients whose elements share memory: one element for all, or rows that overlap.
#include <torch/csrc/autograd/autograd.h>

#include "tests/pipeline/reference_fixture.h"
#include "tests/soak.h"
#include "tests/value/sent.h"

namespace lamina::pipeline {
namespace {

using value::List;
using value::Value;

// Three ranks: a rank 1 that widens one number to many, a rank 2 that sums many to one, and the same here.
struct Widening {
  explicit Widening(std::uint64_t seed) : model(3, seed % 2 == 0 ? "simple" : "interleaved", seed) {
    widens = model.add_function("widens", 1, [this](const at::Tensor& x) { return widen(x); });
    sums = model.add_function("sums", 2, [this](const at::Tensor& x) { return sum(x); });
    overlaps = model.add_function("overlaps", 1, [this](const at::Tensor& x) { return overlap(x); });
  }
  at::Tensor widen(const at::Tensor& x) const { return (x.sum() * wide_weight).expand({4, 3}); }
  at::Tensor sum(const at::Tensor& x) const { return x.sum() * sum_weight; }
  at::Tensor overlap(const at::Tensor& x) const { return (x * wide_weight).view(-1).unfold(0, 3, 1); }

  std::vector<at::Tensor> leaves() const { return {x, wide_weight, sum_weight}; }

  const at::Tensor x = at::arange(1, 13, at::kDouble).view({4, 3}).set_requires_grad(true);
  const at::Tensor wide_weight = at::full({}, 2, at::kDouble).set_requires_grad(true);
  const at::Tensor sum_weight = at::full({}, 3, at::kDouble).set_requires_grad(true);
  Model model;
  base::ModuleId widens, sums, overlaps;
};

// The value of `loss(widens, sums, overlaps, x)`, and its gradients, with calls of other ranks as with functions here;
// in the first step results are waited for, in the others they are references.
using Function = std::function<at::Tensor(const at::Tensor&)>;
using Loss = std::function<at::Tensor(const Function&, const Function&, const Function&, const at::Tensor&)>;

void compare(const Loss& loss) {
  for (std::uint64_t seed = 0; seed < lamina::test::in_a_soak<std::uint64_t>(10, 5) && !testing::Test::HasFailure();
       ++seed) {
    Widening w(seed);
    const auto wanted =
        loss([&](const at::Tensor& v) { return w.widen(v); }, [&](const at::Tensor& v) { return w.sum(v); },
             [&](const at::Tensor& v) { return w.overlap(v); }, w.x);
    const auto gradients = torch::autograd::grad({wanted}, w.leaves(), {}, {}, {}, /*allow_unused=*/true);
    const auto remote = [&](base::ModuleId id) {
      return [&w, id](const at::Tensor& v) { return w.model.call(id, v); };
    };
    for (int step = 0; step < 4; ++step) {
      for (const auto& leaf : w.leaves()) leaf.mutable_grad().reset();
      w.model.run(1, [&](base::Microbatch) {
        const auto found = loss(remote(w.widens), remote(w.sums), remote(w.overlaps), w.x);
        w.model.backward(found);
        EXPECT_TRUE(at::equal(found, wanted)) << found << wanted;
      });
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const auto& found = w.leaves()[i].grad();
        ASSERT_EQ(found.defined(), gradients[i].defined());
        EXPECT_TRUE(!found.defined() || at::equal(found, gradients[i])) << step << found << gradients[i];
      }
    }
  }
}

TEST(ReferenceStrides, OfAnExpandedGradientThatGoesFromCallToCall) {
  compare([](auto& widens, auto& sums, auto&, const at::Tensor& x) { return sums(widens(sums(widens(x)))); });
}

TEST(ReferenceStrides, OfAnExpandedGradientThatReachesALeafAndALocalOperation) {
  compare([](auto&, auto& sums, auto&, const at::Tensor& x) { return sums(x) + sums(x * x); });
}

TEST(ReferenceStrides, OfExpandedGradientsThatAreAdded) {
  compare([](auto& widens, auto& sums, auto&, const at::Tensor& x) {
    const auto y = widens(x);
    return sums(y) + sums(y * 2) + sums(y) + y.sum() + y[0].sum();
  });
}

TEST(ReferenceStrides, OfAnExpandedGradientThatTheBodyGives) {
  compare([](auto& widens, auto&, auto&, const at::Tensor& x) { return widens(x).sum() + widens(x * 2).mean(); });
}

TEST(ReferenceStrides, OfOverlappingOutputsAndTheirGradients) {
  compare([](auto& widens, auto& sums, auto& overlaps, const at::Tensor& x) {
    return sums(overlaps(x)) + overlaps(widens(x)).select(1, 1).sum();
  });
}

// Values arrive in memory of their own, so that it may be written to where torch would refuse to write to the original.
TEST(ReferenceStrides, AnExpandedOutputThatArrivedMayBeWrittenTo) {
  Widening w(0);
  for (int step = 0; step < 3; ++step) {
    w.model.run(1, [&](base::Microbatch) {
      const at::NoGradGuard no_grad;
      const auto y = w.model.call(w.widens, w.x);
      y[0].zero_();
      EXPECT_EQ(y.sum().item<double>(), 9 * 2 * 78);
      EXPECT_EQ(w.model.call(w.sums, y).item<double>(), 3 * 9 * 2 * 78);
      EXPECT_TRUE(y.is_contiguous());
    });
  }
}

TEST(ReferenceStrides, AHookGetsAnExpandedGradientAsItWouldLocally) {
  Widening w(0);
  for (int step = 0; step < 3; ++step) {
    at::Tensor seen;
    w.model.run(1, [&](base::Microbatch) {
      const auto y = w.x * 1;
      y.register_hook([&](const at::Tensor& gradient) { seen = gradient; });
      w.model.backward(w.model.call(w.sums, y));
    });
    EXPECT_EQ(seen.strides(), at::IntArrayRef({0, 0}));
    EXPECT_TRUE(at::equal(seen, at::full({4, 3}, 3, at::kDouble)));
    w.x.mutable_grad().reset();
  }
}

}  // namespace
}  // namespace lamina::pipeline
