// SPDX-License-Identifier: Apache-2.0
// The gradients of a tensor that is used twice, added by the engine of autograd while some are references.
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <set>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/value/gradient_sums.h"
#include "lamina/value/torch_version.h"
#include "tests/value/refusal.h"
#include "tests/value/remote_scale.h"

namespace lamina::value {
namespace {

using torch::autograd::grad;

at::Tensor leaf(std::vector<float> values = {1, 1, 1}) { return at::tensor(values).clone().set_requires_grad(true); }

std::shared_ptr<Sum> sum_behind(const at::Tensor& gradient) {
  return std::dynamic_pointer_cast<Sum>(source_of(gradient));
}

TEST(GradientSum, OfADiamondIsAReferenceThatNobodyHasReadYet) {
  for (const bool keep : {true, false}) {
    const RemoteScale::Options options{.keep = keep};
    const auto a = remote({leaf()}, 2, options);
    const auto b = remote({a}, 3, options), c = remote({a}, 5, options), d = remote({b, c}, 1, options);
    const auto gradient = grad({d}, {a}, {at::ones({3})}).at(0);
    ASSERT_TRUE(sum_behind(gradient)) << keep;
    EXPECT_EQ(sum_behind(gradient)->parts().size(), 2U);
    EXPECT_EQ(call_of(b).given.at(0)->takes() + call_of(c).given.at(0)->takes(), 0);
    EXPECT_TRUE(at::equal(gradient, at::full({3}, 8.)));
  }
}

TEST(GradientSum, GivesTheLeavesOfADiamondTheirGradient) {
  const auto x = leaf();
  const auto a = remote({x * 1}, 2);
  const auto b = remote({a}, 3), c = remote({a}, 5);
  (remote({b, c}, 1).sum() + (a * 7).sum()).backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({3}, 30.))) << x.grad();
}

// Three uses whose gradients give another number in another order: (1e8 - 1e8) + 1 is not 1e8 + (-1e8 + 1).
at::Tensor gradient_of_three_uses(RemoteScale::Options options, const std::vector<double>& factors) {
  const auto a = remote({leaf()}, 1, options);
  std::vector<at::Tensor> uses;
  for (const double factor : factors) uses.push_back(remote({a}, factor, options));
  return grad({remote(uses, 1, options)}, {a}, {at::ones({3})}).at(0);
}

TEST(GradientSum, AddsItsPartsInTheOrderOfTheEngine) {
  std::vector<double> factors{-1e8, 1, 1e8};
  std::set<float> results;
  do {
    const auto lazy = gradient_of_three_uses({}, factors);
    const auto plain = gradient_of_three_uses({.without = true}, factors);
    ASSERT_TRUE(sum_behind(lazy) && !is_pending(plain));
    EXPECT_EQ(sum_behind(lazy)->parts().size(), 3U) << "one flat sum";
    for (const auto& part : sum_behind(lazy)->parts()) EXPECT_TRUE(is_pending(part) && !sum_behind(part));
    EXPECT_TRUE(at::equal(lazy, plain)) << lazy << plain;
    results.insert(plain[0].item<float>());
  } while (std::next_permutation(factors.begin(), factors.end()));
  EXPECT_GT(results.size(), 1U) << "or the order would not matter";
}

// The gradient of `a` through itself, which is `seed`, and through a remote call.
TEST(GradientSum, KeepsALocalPartThatIsWrittenToAfterwards) {
  const auto x = leaf(), a = remote({leaf()}, 1), b = remote({a}, 3);
  const auto local = x + a;
  const auto seed = at::full({3}, 10.F);
  const auto gradients = grad({local, b}, {a, x}, {seed, at::ones({3})});
  ASSERT_TRUE(sum_behind(gradients[0]));
  gradients[1].mul_(100);
  seed.mul_(100);
  EXPECT_TRUE(at::equal(gradients[0], at::full({3}, 13.F))) << gradients[0];
}

// Torch adds in place to a gradient that nobody else holds, and so waits; here `seed` is held.
TEST(GradientSum, ThatBeginsWithALocalPartWaitsAtOnceWhereWaitsAreToBeAlike) {
  for (const bool alike : {false, true}) {
    set_waits_alike(alike ? +[] { return true; } : nullptr);
    const auto a = remote({leaf()}, 1), b = remote({a}, 3);
    const auto seed = at::full({3}, 10.F);
    const auto gradient = grad({leaf() + a, b}, {a}, {seed, at::ones({3})}).at(0);
    EXPECT_EQ(is_pending(gradient), !alike);
    EXPECT_TRUE(at::equal(gradient, at::full({3}, 13.F))) << gradient;
    const auto c = remote({b}, 5), d = remote({b}, 7);
    EXPECT_TRUE(is_pending(grad({remote({c, d}, 1)}, {b}, {at::ones({3})}).at(0))) << "no local part";
  }
  set_waits_alike(nullptr);
}

TEST(GradientSum, OfAChangedPartIsAnErrorNotAWrongNumber) {
  const auto part = reference(at::ones({3}), Strides::kAsTheyArrive);
  const auto alias = part.detach();
  Sum sum({part, reference(at::ones({3}), Strides::kAsTheyArrive)});
  alias.mul_(2);
  const auto text = refusal<base::UsageError>([&] { sum.take(); });
  EXPECT_NE(text.find("write to a clone"), std::string::npos) << text;
}

TEST(GradientSum, IsTheSameTensorEachTimeForEveryThread) {
  const auto awaited = std::make_shared<Awaited>();
  const auto part = make_reference(spec_of(at::ones({3})), awaited, Strides::kAsTheyArrive);
  const auto sum = std::make_shared<Sum>(std::vector<at::Tensor>{part, at::ones({3})});
  std::vector<at::Tensor> taken(2);
  std::vector<std::thread> readers;
  for (auto& it : taken) readers.emplace_back([&] { it = sum->take(); });
  awaited->await_readers(2);
  awaited->deliver(at::ones({3}));
  for (auto& reader : readers) reader.join();
  EXPECT_TRUE(taken[0].is_same(taken[1]) && taken[0].is_same(sum->take()));
  EXPECT_TRUE(at::equal(taken[0], at::full({3}, 2.)));
  EXPECT_FALSE(taken[0].requires_grad());
}

TEST(GradientSum, OfAFailedPartThrowsEachTime) {
  const auto failed = std::make_shared<Made>([]() -> at::Tensor { throw std::runtime_error("rank 1 failed"); });
  Sum sum({at::ones({3}), make_reference(spec_of(at::ones({3})), failed, Strides::kAsTheyArrive)});
  for (int time = 0; time < 2; ++time) {
    EXPECT_EQ(refusal<std::runtime_error>([&] { sum.take(); }), "rank 1 failed");
  }
}

// Runs `body` where the engine runs, in a node's backward.
class Inside : public torch::autograd::Node {
 public:
  explicit Inside(std::function<void()> body) : body_(std::move(body)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    body_();
    return {at::Tensor()};
  }

 private:
  std::function<void()> body_;
};

void in_a_backward(std::function<void()> body) {
  auto output = at::ones({3});
  const auto node = make_node<Inside>(std::move(body));
  node->set_next_edges({torch::autograd::impl::gradient_edge(leaf())});
  torch::autograd::create_gradient_edge(output, node);
  output.backward(at::ones({3}));
}

TEST(GradientSum, OnlyAdditionOfTwoGradientsOfOneKindIsLazy) {
  in_a_backward([] {
    const auto gradient = [] { return reference(at::ones({3}), Strides::kAsTheyArrive); };
    EXPECT_TRUE(is_pending(gradient() + gradient()));
    EXPECT_TRUE(is_pending(gradient() + at::ones({3})));
    EXPECT_TRUE(is_pending(at::ones({3}) + gradient()));
    EXPECT_TRUE(at::equal(at::ones({3}) + gradient() + (gradient() + gradient()), at::full({3}, 4.)));
    const std::vector<at::Tensor> now = {
        at::add(gradient(), gradient(), 2),
        gradient() + at::ones({2, 3}),
        gradient() + at::ones({3}, at::kDouble),
        gradient() + at::ones({3}).to_sparse(),
        gradient() + 1,
        gradient() * gradient(),
        reference(at::ones({3})) + at::ones({3}),
    };
    for (const auto& result : now) EXPECT_FALSE(is_pending(result)) << result;
    at::AutoGradMode grad_mode(true);
    EXPECT_FALSE(is_pending(gradient() + gradient())) << "create_graph";
  });
  at::NoGradGuard no_grad;
  const auto gradient = reference(at::ones({3}), Strides::kAsTheyArrive);
  EXPECT_FALSE(is_pending(gradient + gradient)) << "nobody's backward";
}

}  // namespace
}  // namespace lamina::value
