// SPDX-License-Identifier: Apache-2.0
#include "tests/emulated/emulated.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <thread>

namespace emulated {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Code for all devices knows them by c10's guards alone.
TEST(Emulated, GuardsOfC10SetDevicesAndStreamsOfThreads) {
  const c10::impl::VirtualGuardImpl devices(kType);
  ASSERT_EQ(devices.deviceCount(), 4);
  const c10::DeviceGuard guard(c10::Device(kType, 2));
  EXPECT_EQ(devices.getDevice().index(), 2);
  const auto side = devices.getStreamFromGlobalPool(devices.getDevice());
  {
    const c10::StreamGuard side_guard(side);
    EXPECT_EQ(devices.getStream(devices.getDevice()), side);
    std::thread([&] {
      EXPECT_EQ(devices.getDevice().index(), 0);
      EXPECT_EQ(devices.getStream(c10::Device(kType, 2)), devices.getDefaultStream(c10::Device(kType, 2)));
    }).join();
  }
  EXPECT_NE(devices.getStream(devices.getDevice()), side);
}

TEST(Emulated, AnEventOfAnotherThreadOrdersStreams) {
  const c10::Device device(kType, 1);
  const c10::impl::VirtualGuardImpl devices(kType);
  at::Tensor x = at::ones({1000}, device);
  c10::Event made(kType), ready(kType);
  ready.record(devices.getStream(device));
  std::thread([&] {
    const c10::StreamGuard guard(devices.getStreamFromGlobalPool(device));
    ready.block(guard.current_stream());
    for (int i = 0; i < 50; ++i) {
      x.add_(1);
    }
    made.record(guard.current_stream());
  }).join();
  reset_counts();
  made.block(devices.getStream(device));
  const auto sum = x.sum();
  EXPECT_EQ(counts().waits, 0u);
  EXPECT_EQ(sum.item<float>(), 51'000);
  EXPECT_EQ(counts().waits, 1u);
  EXPECT_EQ(counts().drained, 0u);
}

TEST(Emulated, CountsBytesByDevice) {
  reset_counts();
  const auto before = counts().bytes.at(3);
  {
    const auto x = at::full({1 << 18}, 1.0, at::TensorOptions().device(c10::Device(kType, 3)));
    EXPECT_EQ(counts().bytes.at(3) - before, 1u << 20);
  }
  EXPECT_EQ(counts().bytes.at(3), before);
  EXPECT_EQ(counts().peak_bytes.at(3) - before, 1u << 20);
}

}  // namespace
}  // namespace emulated
