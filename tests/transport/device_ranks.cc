// SPDX-License-Identifier: Apache-2.0
#include "tests/transport/device_ranks.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstdlib>

#include "lamina/device/copies.h"
#include "lamina/device/rank_device.h"
#include "lamina/transport/staging.h"
#include "tests/emulated/emulated.h"

namespace lamina::transport::testing {

using base::Rank;
using Clock = std::chrono::steady_clock;

at::Tensor there(const at::Tensor& tensor) { return tensor.to(devices::rank_device()); }
at::Tensor bytes(std::int64_t size, int value) { return at::full({size}, value, at::kByte); }

void start_on_devices(RankProcesses& job, const std::array<Lends, 2>& lends, const RankProcesses::Body& body,
                      const char* memory_of_the_second) {
  for (int rank = 0; rank < 2; ++rank) {
    job.start(rank, [&, rank] {
      if (rank == 1 && memory_of_the_second != nullptr) ::setenv("EMULATED_MEMORY", memory_of_the_second, 1);
      devices::set_rank_device({at::kPrivateUse1, static_cast<at::DeviceIndex>(rank)});
      auto options = job.options(rank);
      options.lends = lends[rank];
      StagingTransport transport(open_ucx(options));
      Inbox inbox;
      transport.start(inbox.events());
      body(transport, inbox);
      transport.close(true);
    });
  }
}

at::Tensor next(Inbox& inbox) {
  const auto message = inbox.next();
  const auto& tensor = message.body.as<at::Tensor>();
  EXPECT_EQ(tensor.device(), devices::rank_device());
  devices::join_arrival(tensor);
  return tensor.cpu();
}

void exchange(Transport& transport, Inbox& inbox, const std::vector<at::Tensor>& all) {
  const Rank other(1 - transport.rank().value);
  std::vector<at::Tensor> kept, given;
  for (const auto& each : all) {
    kept.push_back(there(each));
    given.push_back(there(each));
  }
  emulated::reset_counts();
  for (std::size_t i = 0; i < all.size(); ++i) {
    transport.send(other, object("kept", kept[i]));
    kept[i].fill_(9);
    transport.send(other, object("given away", std::move(given[i])));
  }
  EXPECT_EQ(emulated::counts().waits, 0);
  for (const auto& each : all) {
    EXPECT_TRUE(at::equal(next(inbox), each)) << each.sizes();
    EXPECT_TRUE(at::equal(next(inbox), each)) << each.sizes();
  }
}

void expect_to_be_told_of(int killed, RankProcesses& job, int ranks) {
  job.await(0, ranks);
  job.kill(killed, SIGKILL);
  const auto since = Clock::now();
  job.await(1);
  EXPECT_LT(Clock::now() - since, std::chrono::seconds(2)) << killed;
  EXPECT_EQ(job.wait(killed), SIGKILL);
  job.expect_success();
}

}  // namespace lamina::transport::testing
