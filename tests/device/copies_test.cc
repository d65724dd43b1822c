// SPDX-License-Identifier: Apache-2.0
// Activations and checkpoints leave a slow accelerator for the host, beside what is computed.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "lamina/checkpoint/snapshot.h"
#include "lamina/device/rank_device.h"
#include "lamina/runtime/offload.h"
#include "tests/emulated/emulated.h"

namespace lamina {
namespace {

constexpr std::int64_t kNumbers = 1024, kBytes = kNumbers * 4;

class CopiesOfADevice : public testing::Test {
 protected:
  CopiesOfADevice() { devices::set_rank_device({at::kPrivateUse1, 0}); }
  ~CopiesOfADevice() override { devices::set_rank_device({at::kCPU}); }

  static at::Tensor host(double value) { return at::full({kNumbers}, value, at::kFloat); }
  static at::Tensor there(double value) {
    return at::full({kNumbers}, value, at::device(devices::rank_device()).dtype(at::kFloat));
  }
  // Made by kernels that take a while.
  static at::Tensor late(double value) {
    auto tensor = there(value - 5);
    for (int i = 0; i < 5; ++i) tensor.add_(1);
    return tensor;
  }
  static std::int64_t waits() { return static_cast<std::int64_t>(emulated::counts().waits); }
};

class Offloading : public CopiesOfADevice {
 protected:
  void keep(int count, int horizon) {
    offload_ = std::make_shared<runtime::Offload>(horizon, runtime::make_device_mover());
    at::zeros({1}, at::device(devices::rank_device()));
    before_ = emulated::counts().bytes.at(0);
    emulated::reset_counts();
    for (int i = 0; i < count; ++i) kept_.push_back(offload_->keep(late(i)));
  }
  std::int64_t bytes() const { return static_cast<std::int64_t>(emulated::counts().bytes.at(0) - before_); }
  std::int64_t peak() const { return static_cast<std::int64_t>(emulated::counts().peak_bytes.at(0) - before_); }

  std::shared_ptr<runtime::Offload> offload_;
  std::vector<std::shared_ptr<runtime::Offload::Kept>> kept_;

 private:
  std::size_t before_ = 0;
};

TEST_F(Offloading, LetsMemoryGoTwoCopiesLaterWhileTheHostGoesOn) {
  keep(10, 1);
  EXPECT_EQ(bytes(), 2 * kBytes);
  EXPECT_EQ(peak(), 3 * kBytes) << "two that leave, and the one that is being made";
  std::vector<at::Tensor> came;
  for (int i = 9; i >= 0; --i) {
    came.push_back(kept_[i]->take());
    kept_[i].reset();
  }
  EXPECT_EQ(waits(), 0);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(at::equal(came[9 - i].cpu(), host(i))) << i;
}

TEST_F(Offloading, BringsAsManyAsTheHorizonSaysAhead) {
  for (const int horizon : {1, 3}) {
    kept_.clear();
    keep(8, horizon);
    kept_[7]->take();
    EXPECT_EQ(bytes(), horizon * kBytes) << "and that which was taken is dropped";
    EXPECT_TRUE(at::equal(kept_[6]->take().cpu(), host(6)));
  }
}

TEST_F(Offloading, GivesMemoryOfWhatIsDroppedToNobodyBeforeItsCopiesHaveEnded) {
  for (int round = 0; round < 10; ++round) {
    kept_.clear();
    keep(3, 1);
    const auto taken = kept_[2]->take();  // and the one before it begins to come
    kept_.clear();
    const auto next = there(100), other = there(200), third = there(300);
    EXPECT_TRUE(at::equal(taken.cpu(), host(2)));
    EXPECT_TRUE(at::equal(next.cpu(), host(100)));
    EXPECT_TRUE(at::equal(other.cpu(), host(200)));
    EXPECT_TRUE(at::equal(third.cpu(), host(300)));
  }
}

TEST_F(Offloading, LeavesTensorsOfOtherDevicesWhereTheyAre) {
  keep(0, 1);
  EXPECT_EQ(offload_->keep(host(1)), nullptr);
  EXPECT_EQ(offload_->keep(host(1).to(at::Device(at::kPrivateUse1, 1))), nullptr);
}

class Snapshots : public CopiesOfADevice {
 protected:
  static std::vector<checkpoint::Part> parts_of(const at::Tensor& tensor) {
    std::vector<checkpoint::Part> parts;
    parts.push_back(checkpoint::whole_part("on the device", archive::Kind::kParameter, tensor));
    parts.push_back(checkpoint::whole_part("on the host", archive::Kind::kContent, host(7)));
    return parts;
  }
  static void await(const devices::Mark& mark) {
    while (!mark.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

TEST_F(Snapshots, HaveWhatWasThereWhileTheHostGoesOn) {
  checkpoint::Snapshot snapshot;
  const auto tensor = late(1);
  auto parts = parts_of(tensor);
  emulated::reset_counts();
  const auto copied = snapshot.take(parts);
  tensor.fill_(-1);
  EXPECT_EQ(emulated::counts().peak_bytes.at(0), emulated::counts().bytes.at(0)) << "nothing more on the device";
  await(*copied);
  EXPECT_EQ(waits(), 0);
  EXPECT_TRUE(at::equal(parts[0].elements, host(1)));
  EXPECT_TRUE(at::equal(parts[1].elements, host(7)));
}

TEST_F(Snapshots, AreNotWrittenByCopiesOfOnesThatWereGivenUp) {
  const c10::impl::VirtualGuardImpl devices_of(at::kPrivateUse1);
  checkpoint::Snapshot snapshot;
  std::shared_ptr<const devices::Mark> first;
  {
    const c10::StreamGuard beside(devices_of.getStreamFromGlobalPool(devices::rank_device()));
    auto tensor = late(1);
    for (int i = 0; i < 20; ++i) tensor.mul_(1);
    auto parts = parts_of(tensor);
    first = snapshot.take(parts);
  }
  auto parts = parts_of(there(2));
  await(*snapshot.take(parts));
  await(*first);
  EXPECT_TRUE(at::equal(parts[0].elements, host(2)));
}

}  // namespace
}  // namespace lamina
