// SPDX-License-Identifier: Apache-2.0
#include "lamina/parameter_server/service.h"
#include "lamina/optim/registry.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "lamina/optim/step.h"

#include "tests/comes_true.h"
#include "tests/parameter_server/ranks.h"

namespace lamina::parameter_server {
namespace {

at::Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble).requires_grad_(true); }

TEST(Service, UpdatesWhatAnotherRankOwnsAsThePlainLoopWould) {
  Ranks ranks(2);
  const auto weight = leaf({3, 4}), bias = leaf({3});
  auto plain_weight = weight.detach().clone().requires_grad_(true),
       plain_bias = bias.detach().clone().requires_grad_(true);
  ranks[0].place(linear("net", weight, bias));

  const auto net = ranks[1].trainer().find(base::Rank(0), "net", ranks.patience());
  const auto optimizer =
      ranks[1].trainer().make_optimizer("SGD", {0.1, 0, 0, 0, 0, 0}, addresses(net), ranks.patience());
  for (int i = 0; i < 3; ++i) {
    const auto input = at::randn({5, 4}, at::kDouble);
    const InContext in(ranks[1]);
    const auto loss = called(ranks[1], net, input, ranks.patience()).pow(2).sum();
    ranks[1].trainer().backward(*in.context, {loss}, {}, false, ranks.patience());
    ranks[1].trainer().step(*in.context, optimizer, ranks.patience());

    at::linear(input, plain_weight, plain_bias).pow(2).sum().backward();
    for (auto* plain : {&plain_weight, &plain_bias}) {
      const at::NoGradGuard no_grad;
      plain->sub_(plain->grad(), 0.1);
      plain->mutable_grad().reset();
    }
  }

  EXPECT_TRUE(at::allclose(weight, plain_weight, 1e-12, 1e-12));
  EXPECT_TRUE(at::allclose(bias, plain_bias, 1e-12, 1e-12));
  EXPECT_FALSE(weight.grad().defined());
  EXPECT_TRUE(comes_true([&] { return ranks[0].contexts() == 0; }));
}

TEST(Service, AddsTheGradientsOfSeveralCallsAndBackwardsOfAContext) {
  Ranks ranks(2);
  const auto weight = leaf({3, 4}), bias = leaf({3});
  ranks[0].place(linear("net", weight, bias));
  const auto net = ranks[1].trainer().find(base::Rank(0), "net", ranks.patience());
  const auto sgd = ranks[1].trainer().make_optimizer("SGD", {1, 0, 0, 0, 0, 0}, addresses(net), ranks.patience());
  const auto before = bias.detach().clone();
  const auto input = at::randn({5, 4}, at::kDouble);
  const InContext in(ranks[1]);
  const auto twice = called(ranks[1], net, input, ranks.patience()) + called(ranks[1], net, input, ranks.patience());
  ranks[1].trainer().backward(*in.context, {twice.sum()}, {}, true, ranks.patience());
  ranks[1].trainer().backward(*in.context, {twice.sum()}, {}, false, ranks.patience());
  ranks[1].trainer().step(*in.context, sgd, ranks.patience());
  EXPECT_TRUE(at::allclose(bias, before - 20));
}

// Rank 1 owns a module that calls one of rank 2, which calls one of rank 1.
TEST(Service, ModulesCallModulesOfOtherRanksInTheSameContext) {
  Ranks ranks(3);
  const auto weight = leaf({4, 4}), bias = leaf({4}), outer = leaf({4});
  ranks[1].place(linear("inner", weight, bias));
  const auto calls = [&](int rank, int owner, const std::string& name, const at::Tensor& scale) {
    return [&ranks, rank, owner, name, scale](value::Value arguments) -> value::Value {
      const auto next = ranks[rank].trainer().find(base::Rank(owner), name, ranks.patience());
      return called(ranks[rank], next, arguments.as<at::Tensor>(), ranks.patience()) * scale;
    };
  };
  const auto middle = leaf({4});
  ranks[2].place({"middle", calls(2, 1, "inner", middle), {{"scale", middle}}});
  ranks[1].place({"outer", calls(1, 2, "middle", outer), {{"scale", outer}}});

  const auto input = leaf({2, 4});
  const auto net = ranks[0].trainer().find(base::Rank(1), "outer", ranks.patience());
  const auto plain = (at::linear(input, weight, bias) * middle * outer).pow(2).sum();
  const auto expected = torch::autograd::grad({plain}, {weight, bias, middle, outer, input});
  {
    const InContext in(ranks[0]);
    const auto loss = called(ranks[0], net, input, ranks.patience()).pow(2).sum();
    EXPECT_TRUE(at::allclose(loss, plain));
    ranks[0].trainer().backward(*in.context, {loss}, {}, false, ranks.patience());
    const auto here = in.context->all_gradients();
    ASSERT_EQ(here.leaves.size(), 1U);
    EXPECT_TRUE(here.leaves[0].is_same(input));
    EXPECT_TRUE(at::allclose(here.gradients[0], expected[4]));

    const std::vector<std::pair<int, at::Tensor>> places = {{1, weight}, {1, bias}, {2, middle}, {1, outer}};
    RemoteModule all;
    for (const auto& [rank, leaf] : places) {
      const auto placed = ranks[rank].place({"", [](value::Value) { return value::Value(); }, {{"", leaf}}});
      all.parameters.push_back(placed.parameters[0]);
    }
    const auto sgd = ranks[0].trainer().make_optimizer("SGD", {1, 0, 0, 0, 0, 0}, addresses(all), ranks.patience());
    std::vector<at::Tensor> before;
    for (const auto& [rank, leaf] : places) before.push_back(leaf.detach().clone());
    ranks[0].trainer().step(*in.context, sgd, ranks.patience());
    for (std::size_t i = 0; i < places.size(); ++i) {
      EXPECT_TRUE(at::allclose(places[i].second, before[i] - expected[i], 1e-12, 1e-12)) << i;
    }
  }
  EXPECT_TRUE(comes_true([&] { return ranks[1].contexts() + ranks[2].contexts() == 0; }));
}

TEST(Service, FindsWhatIsPlacedLater) {
  Ranks ranks(2);
  const auto weight = leaf({2, 2}), bias = leaf({2});
  const auto errors = ranks.run({1, 0}, [&](int rank) {
    if (rank == 0) {
      ranks[0].place(linear("other", weight, bias));
      ranks[0].place(linear("net", weight, bias));
      return;
    }
    EXPECT_EQ(ranks[1].trainer().find(base::Rank(0), "net", ranks.patience()).parameters.size(), 2U);
  });
  EXPECT_FALSE(errors[0] || errors[1]);
}

TEST(Service, GivesNoHistoryOutsideContextsAndWithoutGradMode) {
  Ranks ranks(2);
  ranks[0].place(linear("net", leaf({2, 2}), leaf({2})));
  const auto net = ranks[1].trainer().find(base::Rank(0), "net", ranks.patience());
  const auto input = at::ones({1, 2}, at::kDouble);
  EXPECT_FALSE(called(ranks[1], net, input, ranks.patience()).requires_grad());
  const InContext in(ranks[1]);
  EXPECT_TRUE(called(ranks[1], net, input, ranks.patience()).requires_grad());
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(called(ranks[1], net, input, ranks.patience()).requires_grad());
}

// LAMB divides all gradients by their norm, whichever ranks they are on.
TEST(Service, GivesARuleThatAsksForItTheNormOfTheGradientsOnAllOwners) {
  Ranks ranks(3);
  at::Tensor weights[] = {leaf({3, 2}), leaf({4, 2})}, biases[] = {leaf({3}), leaf({4})};
  RemoteModule parts[2], all;
  std::vector<at::Tensor> there, plain;
  for (int i : {0, 1}) {
    parts[i] = ranks[i].place(linear("net", weights[i], biases[i]));
    all.parameters.insert(all.parameters.end(), parts[i].parameters.begin(), parts[i].parameters.end());
    for (const auto& each : {weights[i], biases[i]}) {
      there.push_back(each);
      plain.push_back(each.detach().clone().requires_grad_(true));
    }
  }
  const optim::Registry registry;
  const auto lamb = registry.find("LAMB");
  std::vector<double> hyper;
  for (const auto& field : lamb->declaration().hyper) hyper.push_back(field.preset);
  const auto optimizer = ranks[2].trainer().make_optimizer("LAMB", hyper, addresses(all), ranks.patience());
  std::vector<optim::State> states(plain.size());
  optim::Threads threads(1);
  for (int i = 0; i < 3; ++i) {
    const auto input = at::randn({5, 2}, at::kDouble);
    const InContext in(ranks[2]);
    const auto loss = called(ranks[2], parts[0], input, ranks.patience()).pow(2).sum() +
                      called(ranks[2], parts[1], input, ranks.patience()).pow(2).sum();
    ranks[2].trainer().backward(*in.context, {loss}, {}, false, ranks.patience());
    ranks[2].trainer().step(*in.context, optimizer, ranks.patience());
    const auto same =
        at::linear(input, plain[0], plain[1]).pow(2).sum() + at::linear(input, plain[2], plain[3]).pow(2).sum();
    const auto gradients = torch::autograd::grad({same}, plain);
    optim::step(*lamb, hyper, plain, gradients, states, threads);
  }
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::allclose(there[i], plain[i], 1e-9, 1e-12)) << i;
}

}  // namespace
}  // namespace lamina::parameter_server
