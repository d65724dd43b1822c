// SPDX-License-Identifier: Apache-2.0
#include "lamina/value/large_blocks.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace lamina::value {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// Torch takes its memory from it while one lives.
struct Installed {
  Installed() : before(c10::GetCPUAllocator()) { take_memory_from_large_blocks(); }
  ~Installed() { c10::SetCPUAllocator(before); }
  c10::Allocator* before;
};

TEST(LargeBlocks, OfTheSameSizeAreUsedAgain) {
  const auto first = large_blocks().allocate(3 * kMiB + 5);
  void* const memory = first.get();
  std::memset(memory, 1, 3 * kMiB + 5);
  const auto other = large_blocks().allocate(3 * kMiB + 5);
  EXPECT_NE(other.get(), memory);
  const auto kept = kept_bytes();
  {
    const auto moved = large_blocks().allocate(5 * kMiB);
  }
  EXPECT_EQ(kept_bytes(), kept + 5 * kMiB);
  const auto again = large_blocks().allocate(5 * kMiB);
  EXPECT_EQ(kept_bytes(), kept);
}

TEST(LargeBlocks, ServeTensorsThatAreResized) {
  const Installed installed;
  auto tensor = at::ones({1 << 20});
  tensor.resize_({3 << 20}).fill_(2);
  tensor.resize_({10});
  EXPECT_TRUE(tensor.eq(2).all().item<bool>());
}

TEST(LargeBlocks, AreGivenBackBeyond16MiB) {
  const Installed installed;
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 20; ++i) tensors.push_back(at::ones({1 << 20}));
  tensors.clear();
  EXPECT_LE(kept_bytes(), 16 * kMiB);
  EXPECT_GE(kept_bytes(), 12 * kMiB);
}

TEST(LargeBlocks, OfLessThan1MiBAreTorchsOwn) {
  const auto kept = kept_bytes();
  {
    const auto small = large_blocks().allocate(kMiB - 1);
  }
  EXPECT_EQ(kept_bytes(), kept);
}

TEST(LargeBlocks, AreGivenAndTakenRaw) {
  for (const std::size_t size : {kMiB / 2, 2 * kMiB}) {
    void* memory = large_blocks().raw_allocate(size);
    std::memset(memory, 1, size);
    large_blocks().raw_deallocate(memory);
  }
}

TEST(LargeBlocks, ServeManyThreadsAndTheirForkedChildren) {
  const Installed installed;
  std::vector<std::thread> threads;
  for (int seed = 0; seed < 3; ++seed) {
    threads.emplace_back([seed] {
      std::mt19937 random(seed);
      std::vector<at::Tensor> mine(6);
      for (int i = 0; i < 400; ++i) {
        auto& place = mine[random() % mine.size()];
        const auto value = static_cast<double>(random() % 1000);
        place = at::full({(1 << 18) + static_cast<std::int64_t>(random() % 8) * 1000}, value);
        ASSERT_EQ(place.max().item<double>(), value);
        ASSERT_EQ(place.min().item<double>(), value);
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);  // one that waits for a lock that nobody has
      {
        const auto block = large_blocks().allocate(2 * kMiB);
      }
      ::_exit(0);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace lamina::value
