// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/data_parallel/replica_threads.h"

namespace lamina::data_parallel {
namespace {

constexpr std::int64_t kMuch = 1 << 20;

void average_gradients(std::span<const NamedTensor> parameters, collective::ProcessGroup& group, std::int64_t bytes) {
  reduce_gradients(parameters, group, bytes, mean_over(group, group.size()));
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

TEST(AverageGradients, ReplicasThatDifferAreAnErrorOnAll) {
  const std::vector<NamedTensor> others[] = {
      {parameter("a", {3}, full({3}, 1))},
      {parameter("b", {2}, full({2}, 1))},
      {parameter("a", {2}, full({2}, 1, at::kFloat), at::kFloat)},
  };
  for (const auto& other : others) {
    ReplicaThreads replicas(2);
    replicas.run([&](int i, auto& group) {
      const std::vector<NamedTensor> mine{parameter("a", {2}, full({2}, 1))};
      EXPECT_THROW(average_gradients(i == 0 ? mine : other, group, kMuch), base::UsageError);
    });
  }
}

}  // namespace
}  // namespace lamina::data_parallel
