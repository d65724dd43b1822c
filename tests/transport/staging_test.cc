// SPDX-License-Identifier: Apache-2.0
// Tensors of an accelerator go to another rank, while the host runs ahead of the device.
#include "lamina/transport/staging.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gmock/gmock.h>

#include <chrono>
#include <tuple>

#include "lamina/base/error.h"
#include "lamina/device/rank_device.h"
#include "lamina/transport/inproc/network.h"
#include "tests/emulated/emulated.h"
#include "tests/message_of.h"
#include "tests/transport/inbox.h"

namespace lamina::transport {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

at::Tensor on_device(const at::Tensor& tensor, int index = 0) {
  return tensor.to(at::Device(devices::rank_device().type(), static_cast<at::DeviceIndex>(index)));
}

class Staging : public testing::Test {
 protected:
  Staging() {
    devices::set_rank_device(devices::choose_device("emulated:0", 0, "test"));
    for (int rank = 0; rank < 2; ++rank) {
      ends_.push_back(std::make_unique<StagingTransport>(network_.connect(base::Rank(rank))));
      ends_.back()->start(inboxes_[rank].events());
    }
  }
  ~Staging() override {
    for (auto& end : ends_) end->close(/*orderly=*/true);
    devices::set_rank_device(at::Device(devices::kHost));
  }

  // The tensor of message `index`, read as the receiver does.
  at::Tensor received(std::size_t index) {
    inboxes_[1].wait(index + 1);
    auto tensor = inboxes_[1].body(index).as<at::Tensor>();
    devices::join_arrival(tensor);
    return tensor;
  }

  inproc::Network network_{2, 1};
  std::array<Inbox, 2> inboxes_;
  std::vector<std::unique_ptr<Transport>> ends_;
};

TEST_F(Staging, BringsTensorsToTheReceiversDevice) {
  const auto sent = on_device(at::arange(100));
  send(*ends_[0], 1, "a", sent);
  const auto come = received(0);
  EXPECT_EQ(come.device(), devices::rank_device());
  EXPECT_TRUE(at::equal(come.cpu(), at::arange(100)));
}

TEST_F(Staging, SendsWhatWasThereWhenItWasSent) {
  auto tensor = on_device(at::full({1000}, 1.0));
  for (int i = 0; i < 10; ++i) {
    send(*ends_[0], 1, "a", tensor);
    tensor.add_(1);  // enqueued before the copy has left
  }
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(at::equal(received(i).cpu(), at::full({1000}, i + 1.0))) << i;
}

TEST_F(Staging, LetsNobodyWaitForTheDevice) {
  auto tensor = on_device(at::full({1000}, 1.0));
  for (int i = 0; i < 20; ++i) tensor.mul_(1.0);
  emulated::reset_counts();
  send(*ends_[0], 1, "a", tensor);
  EXPECT_EQ(emulated::counts().waits, 0);
  EXPECT_TRUE(at::equal(received(0).cpu(), at::full({1000}, 1.0)));
}

TEST_F(Staging, TakesLessThanATenthOfTheDevicesTime) {
  auto tensor = on_device(at::full({1000}, 1.0));
  bool is_less = false;
  for (std::size_t round = 0; round < 3 && !is_less; ++round) {  // others may have the host's time meanwhile
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) {
      for (int kernel = 0; kernel < 3; ++kernel) tensor.mul_(1.0);  // of a millisecond on average
      send(*ends_[0], 1, "a", tensor);
    }
    const auto of_host = std::chrono::steady_clock::now() - begin;
    received(100 * round + 99).cpu();
    is_less = of_host < (std::chrono::steady_clock::now() - begin) / 10;
  }
  EXPECT_TRUE(is_less);
}

TEST_F(Staging, SnapshotsOnlyWhatSomebodyElseHas) {
  constexpr std::int64_t kBytes = 1 << 20;
  network_.hold(base::Rank(0), base::Rank(1));  // what arrives takes memory of the same device here
  const auto taken = [&](at::Tensor sent) {
    const auto before = emulated::counts().bytes.at(0);
    emulated::reset_counts();
    send(*ends_[0], 1, "a", std::move(sent));
    return static_cast<std::int64_t>(emulated::counts().peak_bytes.at(0) - before);
  };
  const auto bytes = [](int value) { return on_device(at::full({kBytes}, value, at::kByte)); };
  const auto kept = bytes(1);
  EXPECT_EQ(taken(kept), kBytes);
  EXPECT_EQ(taken(kept.view({2, -1})), kBytes) << "its memory is shared";
  EXPECT_EQ(taken(bytes(2)), 0);
  EXPECT_EQ(taken(kept.view({-1, 2}).select(1, 0)), kBytes / 2) << "packed, and not copied once more";
  for (int i = 0; i < 10; ++i) bytes(9);  // memory that was let go of is written again
  network_.release(base::Rank(0), base::Rank(1));
  for (const auto& [index, value, count] :
       {std::tuple(0, 1, kBytes), {1, 1, kBytes}, {2, 2, kBytes}, {3, 1, kBytes / 2}}) {
    EXPECT_TRUE(at::equal(received(index).cpu().flatten(), at::full({count}, value, at::kByte))) << index;
  }
}

TEST_F(Staging, KeepsTheOrderOfMessagesWithAndWithoutTensors) {
  for (int i = 0; i < 5; ++i) {
    send(*ends_[0], 1, base::str("tensor ", i), on_device(at::full({10}, i)));
    send(*ends_[0], 1, base::str("word ", i), std::int64_t{i});
  }
  EXPECT_THAT(inboxes_[1].wait(10), ElementsAre("0:tensor 0", "0:word 0", "0:tensor 1", "0:word 1", "0:tensor 2",
                                                "0:word 2", "0:tensor 3", "0:word 3", "0:tensor 4", "0:word 4"));
}

TEST_F(Staging, GivesUpTensorsOfAFailedStepAndNeitherItsEndNorThoseOfStepsBefore) {
  auto tensor = on_device(at::full({10}, 1.0));
  const auto about = [&](std::int64_t step, const std::string& text, const value::Value& body) {
    Message message;
    message.kind = "text";
    message.call = {base::Rank(0), base::Step(step), kWholeStep, 0};
    message.fields = text;
    message.body = body;
    return message;
  };
  for (int i = 0; i < 20; ++i) tensor.add_(1);
  for (const std::int64_t step : {1, 1, 2, 2, 2}) ends_[0]->send(base::Rank(1), about(step, base::str(step), tensor));
  ends_[0]->tell(base::Rank(1), about(2, "failed", {}));
  ends_[0]->give_up_sends(base::Step(2));
  ends_[0]->send(base::Rank(1), about(3, "3", tensor));
  EXPECT_THAT(inboxes_[1].wait(4), ElementsAre("0:1", "0:1", "0:failed", "0:3"));
}

TEST_F(Staging, TakesTensorsOfAnySize) {
  const std::vector<at::Tensor> all{at::empty({0}), at::full({1}, 7, at::kByte), at::full({64 << 20}, 2, at::kByte),
                                    at::arange(12).view({3, 4}).t()};
  for (const auto& each : all) send(*ends_[0], 1, "a", on_device(each));
  for (std::size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(received(i).cpu(), all[i])) << i;
}

TEST_F(Staging, SendsToTheRankItself) {
  auto tensor = on_device(at::full({1000}, 1.0));
  send(*ends_[1], 1, "a", tensor);
  tensor.zero_();
  EXPECT_TRUE(at::equal(received(0).cpu(), at::full({1000}, 1.0)));
}

TEST_F(Staging, KeepsNoMemoryOfWhatHasGone) {
  const auto tensor = on_device(at::full({1000}, 1.0));
  const auto round = [&](std::size_t i) {
    send(*ends_[0], 1, "a", tensor);
    received(i).cpu();
  };
  for (std::size_t i = 0; i < 3; ++i) round(i);
  const auto peak = [&] { return emulated::counts().peak_bytes.at(0); };
  emulated::reset_counts();
  // The inbox keeps what came.
  for (std::size_t i = 3; i < 30; ++i) round(i);
  EXPECT_LT(peak(), (30 + 8) * 1000 * sizeof(double));
}

TEST_F(Staging, RefusesTensorsOfAThirdDevice) {
  const auto elsewhere = on_device(at::full({3}, 1.0), 1);
  EXPECT_THAT(message_of<base::UsageError>([&] { send(*ends_[0], 1, "a", elsewhere); }),
              HasSubstr("a tensor on emulated:1 cannot go to another rank"));
}

TEST_F(Staging, TellsOfALostReceiverAsAnyTransportDoes) {
  network_.kill(base::Rank(1));
  EXPECT_THAT(inboxes_[0].wait(1), ElementsAre("lost 1"));
  EXPECT_NO_THROW(send(*ends_[0], 1, "a", on_device(at::full({3}, 1.0))));  // the loss has been told
}

}  // namespace
}  // namespace lamina::transport
