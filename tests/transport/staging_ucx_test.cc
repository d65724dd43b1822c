// SPDX-License-Identifier: Apache-2.0
// Tensors of slow accelerators go to ranks that are processes of their own.
#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "tests/transport/device_ranks.h"

namespace lamina::transport {
namespace {

using base::Rank;
using testing::bytes;
using testing::exchange;
using testing::expect_to_be_told_of;
using testing::Inbox;
using testing::object;
using testing::RankProcesses;
using testing::start_on_devices;
using testing::there;

TEST(StagingOverUcx, BringsTensorsOfAnySizeAsTheyWereWhenTheyWereSent) {
  RankProcesses job(2);
  const std::vector<at::Tensor> all{bytes(0, 1), bytes(1, 2), bytes(10'000, 3), bytes(64 << 20, 4),
                                    at::arange(12).view({3, 4}).t()};
  start_on_devices(job, {}, [&](Transport& transport, Inbox& inbox) { exchange(transport, inbox, all); });
  job.expect_success();
}

TEST(StagingOverUcx, TellsWithinTwoSecondsOfAPeerThatIsKilledDuringACopy) {
  for (const int killed : {0, 1}) {  // the one that sends, the one that is sent to
    RankProcesses job(2);
    start_on_devices(job, {}, [&](Transport& transport, Inbox& inbox) {
      const auto own = transport.rank().value;
      if (own == 0) {
        auto number = there(bytes(1, 0));
        for (int i = 0; i < 2000; ++i) number.add_(1);  // two seconds
        transport.send(Rank(1), object("late", at::full({8 << 20}, 1, number.options())));
      }
      job.reach(0);
      if (own == killed) job.await(15);  // for ever
      EXPECT_EQ(inbox.lost(Rank(killed)), "its process ended");
      job.reach(1);
    });
    expect_to_be_told_of(killed, job, 2);
  }
}

}  // namespace
}  // namespace lamina::transport
