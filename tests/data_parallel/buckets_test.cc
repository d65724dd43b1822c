// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/buckets.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lamina/data_parallel/agreement.h"
#include "tests/data_parallel/replica_threads.h"

namespace lamina::data_parallel {
namespace {

constexpr std::int64_t kMuch = 1 << 20;

// Words of gradients none of which was started early.
std::vector<Gradient> words(std::span<const NamedTensor> parameters) {
  std::vector<Gradient> words;
  for (const auto& [name, tensor] : parameters) {
    words.push_back(tensor.grad().defined() ? Gradient::kUnsent : Gradient::kNone);
  }
  return words;
}

void average_gradients(std::span<const NamedTensor> parameters, collective::Group& group, std::int64_t bytes) {
  std::vector<bool> present;
  for (const auto word : agree(parameters, words(parameters), {}, group, {}))
    present.push_back(word != Gradient::kNone);
  Buckets(bytes).reduce(parameters, present, mean_over({&group, group.size(), {}}));
}

NamedTensor parameter(const std::string& name, at::IntArrayRef shape, const at::Tensor& gradient,
                      at::ScalarType type = at::kDouble) {
  auto tensor = at::zeros(shape, type).set_requires_grad(true);
  if (gradient.defined()) tensor.mutable_grad() = gradient;
  return {name, tensor};
}

at::Tensor full(at::IntArrayRef shape, double value, at::ScalarType type = at::kDouble) {
  return at::full(shape, value, type);
}

TEST(AverageGradients, EveryReplicaGetsTheMean) {
  ReplicaThreads replicas(3);
  replicas.run([](int i, auto& group) {
    const std::vector<NamedTensor> parameters{parameter("a", {2, 3}, full({2, 3}, i)),
                                              parameter("b", {}, full({}, 10 * i))};
    average_gradients(parameters, group, kMuch);
    EXPECT_TRUE(at::equal(parameters[0].tensor.grad(), full({2, 3}, 1)));
    EXPECT_TRUE(at::equal(parameters[1].tensor.grad(), full({}, 10)));
  });
}

TEST(AverageGradients, WhatNoReplicaHasStaysUndefined) {
  ReplicaThreads replicas(2);
  replicas.run([](int i, auto& group) {
    const std::vector<NamedTensor> parameters{parameter("a", {2}, {}), parameter("b", {2}, full({2}, i)),
                                              parameter("c", {2}, {})};
    average_gradients(parameters, group, kMuch);
    EXPECT_FALSE(parameters[0].tensor.grad().defined());
    EXPECT_TRUE(at::equal(parameters[1].tensor.grad(), full({2}, 0.5)));
    EXPECT_FALSE(parameters[2].tensor.grad().defined());
  });
}

TEST(AverageGradients, WhatOneReplicaLacksCountsAsZeroThere) {
  ReplicaThreads replicas(2);
  replicas.run([](int i, auto& group) {
    const std::vector<NamedTensor> parameters{parameter("a", {2}, i == 0 ? full({2}, 4) : at::Tensor())};
    average_gradients(parameters, group, kMuch);
    EXPECT_TRUE(at::equal(parameters[0].tensor.grad(), full({2}, 2)));
  });
}

TEST(AverageGradients, GradientsAreChangedInPlace) {
  ReplicaThreads replicas(2);
  replicas.run([](int i, auto& group) {
    const auto gradient = full({3, 2}, i).t();  // not contiguous
    const std::vector<NamedTensor> parameters{parameter("a", {2, 3}, gradient)};
    average_gradients(parameters, group, kMuch);
    EXPECT_TRUE(parameters[0].tensor.grad().is_same(gradient));
    EXPECT_TRUE(at::equal(gradient, full({2, 3}, 0.5)));
  });
}

TEST(AverageGradients, TypesAndBucketsDoNotMix) {
  ReplicaThreads replicas(2);
  replicas.run([](int i, auto& group) {
    std::vector<NamedTensor> parameters;
    for (int k = 0; k < 6; ++k) {
      const auto type = k % 2 ? at::kFloat : at::kDouble;
      parameters.push_back(parameter(std::to_string(k), {4}, full({4}, k + i, type), type));
    }
    average_gradients(parameters, group, 64);  // two of the doubles, four of the floats
    for (int k = 0; k < 6; ++k) {
      EXPECT_TRUE(at::equal(parameters[k].tensor.grad(), full({4}, k + 0.5, k % 2 ? at::kFloat : at::kDouble))) << k;
    }
  });
  EXPECT_EQ(replicas.collectives(), 1 + 2 + 1) << "the flags, two buckets of doubles, one of floats";
}

TEST(AverageGradients, AMeanOfHalfPrecisionDoesNotOverflow) {
  ReplicaThreads replicas(2);
  replicas.run([](int i, auto& group) {
    const std::vector<NamedTensor> parameters{parameter("a", {2}, full({2}, 60000, at::kHalf), at::kHalf)};
    average_gradients(parameters, group, kMuch);
    EXPECT_TRUE(at::equal(parameters[0].tensor.grad(), full({2}, 60000, at::kHalf)));
  });
}

TEST(AverageGradients, ComplexOnesAreAveraged) {
  ReplicaThreads replicas(2);
  replicas.run([](int i, auto& group) {
    const auto one = at::full({2}, c10::complex<double>(2. * i, 4.), at::kComplexDouble);
    const std::vector<NamedTensor> parameters{parameter("a", {2}, one, at::kComplexDouble)};
    average_gradients(parameters, group, kMuch);
    EXPECT_TRUE(at::equal(one, at::full({2}, c10::complex<double>(1., 4.), at::kComplexDouble)));
  });
}

TEST(AverageGradients, SparseOnesBecomeDense) {
  ReplicaThreads replicas(2);
  replicas.run([](int i, auto& group) {
    const auto index = at::full({1, 1}, i, at::kLong);
    const auto sparse = at::sparse_coo_tensor(index, full({1, 2}, 6), {3, 2});
    const std::vector<NamedTensor> parameters{parameter("a", {3, 2}, sparse)};
    average_gradients(parameters, group, kMuch);
    EXPECT_TRUE(at::equal(parameters[0].tensor.grad(), at::cat({full({2, 2}, 3), full({1, 2}, 0)})));
  });
}

TEST(AverageGradients, OnesThatLieTransposedOrRepeatOneNumberAreAveraged) {
  ReplicaThreads replicas(2);
  replicas.run([](int i, auto& group) {
    const auto numbers = at::arange(6, at::kDouble).view({3, 2}).t() * (1 + 2 * i);
    const auto repeated = full({1}, 3. * i).expand({4});  // what sum() sends back
    const std::vector<NamedTensor> parameters{parameter("a", {2, 3}, numbers),
                                              parameter("b", {4}, i == 0 ? at::Tensor() : repeated.clone())};
    average_gradients(parameters, group, kMuch);
    EXPECT_TRUE(at::equal(parameters[0].tensor.grad(), at::arange(6, at::kDouble).view({3, 2}).t() * 2));
    EXPECT_TRUE(at::equal(parameters[1].tensor.grad(), full({4}, 1.5)));
  });
}

// Buckets as a hook sees them.
struct Seen {
  const void* memory;
  std::vector<double> gradients;
  std::size_t parameters;
};

Reduce watching(std::vector<Seen>& seen) {
  return [&seen](const GradientBucket& bucket) {
    const auto* first = bucket.gradients.const_data_ptr<double>();
    seen.push_back({first, {first, first + bucket.gradients.numel()}, bucket.parameters.size()});
    return bucket.gradients;
  };
}

TEST(Buckets, TheMemoryStaysFromOneReductionToTheNext) {
  Buckets buckets(kMuch);
  std::vector<Seen> seen;
  const std::vector<NamedTensor> parameters{parameter("a", {3}, full({3}, 1)), parameter("b", {2}, full({2}, 2))};
  for (int pass = 0; pass < 3; ++pass) buckets.reduce(parameters, {true, true}, watching(seen));
  for (const auto& each : seen) {
    EXPECT_EQ(each.memory, seen.front().memory);
    EXPECT_EQ(each.gradients, (std::vector<double>{1, 1, 1, 2, 2}));
  }
}

TEST(Buckets, HoldWhoHasGradientsThisTime) {
  Buckets buckets(kMuch);
  std::vector<Seen> seen;
  const std::vector<NamedTensor> parameters{parameter("a", {3}, full({3}, 1)), parameter("b", {2}, {})};
  buckets.reduce(parameters, {true, false}, watching(seen));
  buckets.reduce(parameters, {true, true}, watching(seen));
  buckets.reduce(parameters, {false, true}, watching(seen));
  EXPECT_EQ(seen[0].gradients, (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(seen[1].gradients, (std::vector<double>{1, 1, 1, 0, 0})) << "nothing of the bucket before";
  EXPECT_EQ(seen[2].parameters, 1U);
}

TEST(Buckets, WhatAHookKeepsIsNotWrittenAgain) {
  Buckets buckets(8);
  std::vector<at::Tensor> kept;
  const auto keep = [&](const GradientBucket& bucket) {
    kept.push_back(bucket.gradients);
    return bucket.gradients;
  };
  const std::vector<NamedTensor> parameters{parameter("a", {2}, full({2}, 1)), parameter("b", {2}, full({2}, 2))};
  buckets.reduce(parameters, {true, true}, keep);
  EXPECT_TRUE(at::equal(kept[0], full({2}, 1)));
  EXPECT_TRUE(at::equal(kept[1], full({2}, 2)));
}

TEST(Buckets, AGradientThatTheUserKeepsStaysTheOneItWas) {
  Buckets buckets(kMuch);
  const std::vector<NamedTensor> parameters{parameter("a", {2}, full({2}, 1))};
  const auto same = [](const GradientBucket& bucket) { return bucket.gradients; };
  buckets.reduce(parameters, {true}, same);
  const auto kept = parameters[0].tensor.grad();
  at::Tensor(parameters[0].tensor).mutable_grad() = full({2}, 5);
  buckets.reduce(parameters, {true}, same);
  EXPECT_TRUE(at::equal(kept, full({2}, 1)));
}

TEST(Agree, ReplicasThatDifferAreAnErrorOnAll) {
  const std::vector<NamedTensor> others[] = {
      {parameter("a", {3}, full({3}, 1))},
      {parameter("b", {2}, full({2}, 1))},
      {parameter("a", {2}, full({2}, 1, at::kFloat), at::kFloat)},
  };
  for (const auto& other : others) {
    ReplicaThreads replicas(2);
    replicas.run([&](int i, auto& group) {
      const std::vector<NamedTensor> mine{parameter("a", {2}, full({2}, 1))};
      const auto& here = i == 0 ? mine : other;
      EXPECT_THROW(agree(here, words(here), {}, group, {}), base::UsageError);
      EXPECT_THROW(agree({}, {}, here, group, {}), base::UsageError) << "the same of buffers";
    });
  }
}

}  // namespace
}  // namespace lamina::data_parallel
