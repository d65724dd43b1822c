// SPDX-License-Identifier: Apache-2.0
#include "lamina/data_parallel/buffers.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tests/data_parallel/replica_threads.h"

namespace lamina::data_parallel {
namespace {

TEST(BroadcastBuffers, EveryReplicaGetsTheFirstOnesValuesWhateverTheirType) {
  ReplicaThreads replicas(3);
  replicas.run([](int i, auto& group) {
    const std::vector<NamedTensor> buffers{{"flag", at::full({3}, i == 0, at::kBool)},
                                           {"count", at::full({}, 7 + i, at::kLong)},
                                           {"mean", at::full({2, 2}, 0.5 + i, at::kFloat).t()},
                                           {"nothing", at::empty({0}, at::kDouble)}};
    const auto mean = buffers[2].tensor;
    broadcast_buffers(buffers, group);
    EXPECT_TRUE(buffers[0].tensor.all().item<bool>());
    EXPECT_EQ(buffers[1].tensor.item<std::int64_t>(), 7);
    EXPECT_TRUE(at::equal(mean, at::full({2, 2}, 0.5, at::kFloat))) << "in place";
  });
}

TEST(BroadcastBuffers, BuffersOfDifferentShapesAreAnErrorOnAll) {
  ReplicaThreads replicas(2);
  replicas.run([](int i, auto& group) {
    const std::vector<NamedTensor> buffers{{"mask", at::zeros({2 + i})}};
    EXPECT_THROW(broadcast_buffers(buffers, group), base::UsageError);
  });
}

}  // namespace
}  // namespace lamina::data_parallel
