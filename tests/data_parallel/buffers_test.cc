// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/buffers.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/data_parallel/replica_threads.h"

namespace lamina::data_parallel {
namespace {

TEST(Broadcast, EveryReplicaGetsTheFirstOnesValuesWhateverTheirType) {
  ReplicaThreads replicas(3);
  replicas.run([](int i, auto& group) {
    const std::vector<NamedTensor> buffers{{"flag", at::full({3}, i == 0, at::kBool)},
                                           {"count", at::full({}, 7 + i, at::kLong)},
                                           {"mean", at::full({2, 2}, 0.5 + i, at::kFloat).t()},
                                           {"nothing", at::empty({0}, at::kDouble)}};
    const auto mean = buffers[2].tensor;
    broadcast(buffers, group, 0, {});
    EXPECT_TRUE(buffers[0].tensor.all().item<bool>());
    EXPECT_EQ(buffers[1].tensor.item<std::int64_t>(), 7);
    EXPECT_TRUE(at::equal(mean, at::full({2, 2}, 0.5, at::kFloat))) << "in place";
  });
}

TEST(Broadcast, OthersThanTheFirstMayBeTheRoot) {
  ReplicaThreads replicas(3);
  replicas.run([](int i, auto& group) {
    const std::vector<NamedTensor> buffers{{"flag", at::full({1}, i == 1, at::kBool)},
                                           {"phase", at::full({3}, c10::complex<double>(i, 2. * i))}};
    broadcast(buffers, group, 2, {});
    EXPECT_FALSE(buffers[0].tensor.item<bool>());
    EXPECT_TRUE(at::equal(buffers[1].tensor, at::full({3}, c10::complex<double>(2., 4.))));
  });
}

}  // namespace
}  // namespace lamina::data_parallel
