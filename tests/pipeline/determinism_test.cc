// SPDX-License-Identifier: Apache-2.0
// Equal bits in every order of arrival.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <optional>

#include "tests/pipeline/pipeline_fixture.h"
#include "tests/soak.h"

namespace lamina::pipeline {
namespace {

using value::Value;

constexpr int kMicrobatches = 5, kSize = 16;

// Runs a module without a graph, and once more in its backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  using Run = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const Run* run) {
    context->save_for_backward({x});
    context->saved_data["run"] = reinterpret_cast<std::int64_t>(run);
    return (*run)(x).detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto& run = *reinterpret_cast<const Run*>(context->saved_data["run"].toInt());
    const at::AutoGradMode graph(true);
    const auto x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    run(x).backward(gradients[0]);
    return {x.grad(), {}};
  }
};

// Three ranks whose modules are called twice, from each other, recomputed, as data decide, and share a weight.
class Model {
 public:
  struct Options {
    std::string schedule;
    std::uint64_t seed = 0;
    bool deterministic = false;
    bool statistics = false;  // forwards write a buffer
  };

  explicit Model(const Options& options)
      : options_(options),
        pipeline_(3, options.schedule, options.seed, 2 + static_cast<int>(options.seed % 3), options.deterministic) {
    for (int i = 0; i < 3; ++i) weights_.push_back(noise(i).set_requires_grad(true));
    const auto scale = [this](int rank) {
      return
          [this, rank](Job&) { return [this, rank](Value x) { return Value(x.as<at::Tensor>() * weights_[rank]); }; };
    };
    local_ = pipeline_.add("local", 0, scale(0));
    middle_ =
        pipeline_.add("middle", 1, [this](Job&) { return [this](Value x) { return middle(x.as<at::Tensor>()); }; });
    sharing_ = pipeline_.add(
        "sharing", 1, [this](Job&) { return [this](Value x) { return Value(x.as<at::Tensor>() + weights_[1]); }; });
    last_ = pipeline_.add("last", 2, [this](Job& job) {
      return [this, &job](Value x) {
        const auto inner = job.call(middle_, x.as<at::Tensor>() * weights_[2]).as<at::Tensor>();
        return Value(inner * weights_[2] + job.call(sharing_, inner).as<at::Tensor>());
      };
    });
    if (!options.deterministic) return;
    for (int rank = 0; rank < 3; ++rank) pipeline_.job(rank).set_order({weights_[rank]}, options.statistics);
  }

  void step() {
    const auto outcomes = pipeline_.step(kMicrobatches, [this](base::Microbatch microbatch) {
      body(static_cast<int>(microbatch.value));
      return Value();
    });
    for (const auto& outcome : outcomes) ASSERT_EQ(message_of(outcome.error), "") << "seed " << options_.seed;
  }

  at::Tensor gradients() const {
    return at::stack({weights_[0].grad(), weights_[1].grad(), weights_[2].grad()}).clone();
  }
  at::Tensor statistics() const { return statistics_; }

 private:
  static at::Tensor noise(int seed) {
    const auto wave = at::arange(kSize, at::kFloat) * (1.37F + 0.61F * static_cast<float>(seed));
    return at::sin(wave) * at::exp(at::cos(wave * 3.1F));
  }

  Value middle(const at::Tensor& x) {
    if (options_.statistics) {
      const at::NoGradGuard no_grad;
      statistics_ = statistics_ * 0.9F + x.detach().mean() * 0.1F;
    }
    return at::tanh(x * weights_[1]);
  }

  at::Tensor call(base::ModuleId id, const at::Tensor& x) { return pipeline_.job(0).call(id, x).as<at::Tensor>(); }

  void body(int microbatch) {
    const auto x = noise(10 + microbatch).set_requires_grad(true);
    auto y = call(middle_, call(local_, x));
    if (microbatch % 2 == 0) y = y + call(middle_, y);
    y = call(middle_, y) + call(last_, y) + call(sharing_, y);           // none needs another
    if (y.sum().item<float>() > 0) y = call(sharing_, call(local_, y));  // data decide
    y = Recomputed::apply(y, &recompute_);
    pipeline_.job(0).backward({(call(local_, y) * noise(20 + microbatch)).sum()}, {}, 1);
  }

  const Options options_;
  std::vector<at::Tensor> weights_;
  at::Tensor statistics_ = at::zeros({});
  base::ModuleId local_, middle_, sharing_, last_;
  const Recomputed::Run recompute_ = [this](const at::Tensor& x) { return call(last_, x) * weights_[0]; };
  Pipeline pipeline_;
};

// LAMINA_SOAK multiplies the seeds.
std::uint64_t seeds() { return lamina::test::in_a_soak<std::uint64_t>(20000, 10); }

class Determinism : public testing::TestWithParam<const char*> {};

TEST_P(Determinism, GradientsHaveTheSameBitsInEveryOrderOfArrival) {
  at::Tensor first;
  for (std::uint64_t seed = 0; seed < seeds() && !HasFailure(); ++seed) {
    Model model({GetParam(), seed, true});
    model.step();
    model.step();
    if (!first.defined()) first = model.gradients();
    EXPECT_TRUE(at::equal(model.gradients(), first)) << "seed " << seed;
  }
}

TEST_P(Determinism, GradientsAreThoseOfAnyOtherOrderButForRounding) {
  Model model({GetParam(), 0, true}), other({GetParam(), 1, false});
  model.step();
  other.step();
  EXPECT_TRUE(at::allclose(model.gradients(), other.gradients(), 1e-4, 1e-4));
}

TEST_P(Determinism, WhatForwardsWriteHasTheSameBitsInEveryOrderOfArrival) {
  at::Tensor gradients, statistics;
  for (std::uint64_t seed = 0; seed < seeds() && !HasFailure(); ++seed) {
    Model model({GetParam(), seed, true, true});
    model.step();
    model.step();
    if (!gradients.defined()) gradients = model.gradients();
    if (!statistics.defined()) statistics = model.statistics();
    EXPECT_TRUE(at::equal(model.gradients(), gradients)) << "seed " << seed;
    EXPECT_TRUE(at::equal(model.statistics(), statistics)) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, Determinism, testing::Values("simple", "interleaved", "zero_bubble"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace lamina::pipeline
