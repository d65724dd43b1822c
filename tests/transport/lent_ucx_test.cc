// SPDX-License-Identifier: Apache-2.0
// Tensors go from device to device. UCX knows no emulated memory; it is lent to it by its twin, as the host's.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>

#include <array>
#include <atomic>
#include <cstdlib>

#include "lamina/device/copies.h"
#include "lamina/device/lending.h"
#include "lamina/device/rank_device.h"
#include "lamina/transport/staging.h"
#include "lamina/transport/ucx/probe.h"
#include "lamina/transport/ucx/wire.h"
#include "tests/comes_true.h"
#include "tests/emulated/device.h"
#include "tests/emulated/emulated.h"
#include "tests/soak.h"
#include "tests/transport/device_ranks.h"

namespace lamina::transport {
namespace {

using base::Rank;
using testing::bytes;
using testing::exchange;
using testing::expect_to_be_told_of;
using testing::Inbox;
using testing::Lends;
using testing::next;
using testing::object;
using testing::RankProcesses;
using testing::start_on_devices;
using testing::there;

std::atomic<int> asked = 0;  // how often UCX was given an address on the device

const Lends kByItsTwin = devices::Lending{"host", [](const void* address) -> void* {
                                            ++asked;
                                            return emulated::twin(address);
                                          }};
const Lends kNotThisMemory = devices::Lending{"host", [](const void*) -> void* { return nullptr; }};
const Lends kOfAnotherKind = devices::Lending{"tape", [](const void*) -> void* { return nullptr; }};

void exchange_all_sizes(Transport& transport, Inbox& inbox, std::int64_t largest = 1 << 20) {
  exchange(transport, inbox,
           {bytes(0, 1), bytes(1, 2), bytes(10'000, 3), bytes(largest, 4), at::arange(120'000).view({300, 400}).t()});
}

TEST(LentOverUcx, BringsTensorsOfAnySizeAsTheyWereWhenTheyWereSent) {
  RankProcesses job(2);
  start_on_devices(job, {kByItsTwin, kByItsTwin}, [](Transport& transport, Inbox& inbox) {
    exchange_all_sizes(transport, inbox, 64 << 20);
    // Each large buffer that goes is looked at and sent; for each that comes memory is looked at and received into.
    EXPECT_TRUE(comes_true([] { return asked == 4 * 2 + 4 * 2; })) << asked;
  });
  job.expect_success();
}

TEST(LentOverUcx, StagesWhereOneEndLendsNothingOrNotThis) {
  const std::vector<std::array<Lends, 2>> pairs{{kByItsTwin, std::nullopt},
                                                {std::nullopt, kByItsTwin},
                                                {kByItsTwin, kOfAnotherKind},
                                                {kNotThisMemory, kNotThisMemory}};
  for (const auto& lends : pairs) {
    RankProcesses job(2);
    start_on_devices(job, lends, [](Transport& transport, Inbox& inbox) {
      exchange_all_sizes(transport, inbox);
      EXPECT_EQ(asked, 0);
    });
    job.expect_success();
  }
}

TEST(LentOverUcx, TakesToTheHostWhatIsForMemoryThatIsNotLent) {
  RankProcesses job(2);
  start_on_devices(job, {kByItsTwin, kNotThisMemory}, [](Transport& transport, Inbox& inbox) {
    exchange_all_sizes(transport, inbox);
    if (transport.rank() == Rank(0)) EXPECT_TRUE(comes_true([] { return asked == 4 * 2; })) << asked;
  });
  job.expect_success();
}

TEST(LentOverUcx, SaysThatUcxKnowsNoSuchMemory) {
  RankProcesses job(2);
  start_on_devices(job, {kOfAnotherKind, kByItsTwin}, [](Transport& transport, Inbox&) {
    if (transport.rank() == Rank(1)) return;
    auto options = UcxOptions{.rank = Rank(0), .lends = kOfAnotherKind};
    ::testing::internal::CaptureStderr();
    open_ucx(options)->close(true);
    EXPECT_THAT(
        ::testing::internal::GetCapturedStderr(),
        ::testing::HasSubstr("LAMINA_LANES=1: this UCX knows no memory of kind tape, so tensors of the device go "
                             "through the host"));
  });
  job.expect_success();
}

TEST(LentOverUcx, TakesTensorsOfBothPlacesInOneMessage) {
  RankProcesses job(2);
  start_on_devices(job, {kByItsTwin, kByItsTwin}, [](Transport& transport, Inbox& inbox) {
    const std::vector<at::Tensor> values{bytes(1 << 20, 1), bytes(100, 2), bytes(2 << 20, 3), bytes(1 << 20, 4)};
    const Rank other(1 - transport.rank().value);
    for (int round = 0; round < 20; ++round) {
      transport.send(other,
                     object("both", value::List{{there(values[0]), there(values[1]), values[2], there(values[3])}}));
    }
    for (int round = 0; round < 20; ++round) {
      const auto message = inbox.next();
      const auto& items = message.body.as<value::List>().items;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto& tensor = items.at(i).as<at::Tensor>();
        EXPECT_EQ(tensor.is_cpu(), i == 2);
        devices::join_arrival(tensor);
        EXPECT_TRUE(at::equal(tensor.cpu(), values[i])) << i;
      }
    }
  });
  job.expect_success();
}

TEST(LentOverUcx, WritesToNoMemoryThatAStreamStillHas) {
  for (int seed = 0; seed < test::in_a_soak(100, 1); ++seed) {
    ::setenv("EMULATED_SEED", std::to_string(seed).c_str(), 1);  // of the ranks, which are yet to read it
    RankProcesses job(2);
    start_on_devices(job, {kByItsTwin, kByItsTwin}, [&](Transport& transport, Inbox& inbox) {
      const Rank other(1 - transport.rank().value);
      for (int round = 0; round < 30; ++round) {
        transport.send(other, object("given away", there(bytes(1 << 20, round))));
        EXPECT_TRUE(at::equal(next(inbox), bytes(1 << 20, round)))
            << seed << ", " << round;  // and lets go of its memory
      }
    });
    job.expect_success();
  }
  ::unsetenv("EMULATED_SEED");
}

TEST(LentOverUcx, KeepsNoMemoryOfWhatHasGone) {
  RankProcesses job(2);
  start_on_devices(job, {kByItsTwin, kByItsTwin}, [](Transport& transport, Inbox& inbox) {
    const Rank other(1 - transport.rank().value);
    const auto tensor = there(bytes(1 << 20, 1));
    const auto device = static_cast<std::size_t>(transport.rank().value);
    const auto now = [&] { return emulated::counts().bytes.at(device); };
    const auto before = now();
    for (int round = 0; round < 20; ++round) {
      transport.send(other, object("kept", tensor));
      next(inbox);
    }
    EXPECT_TRUE(comes_true([&] { return now() <= before; })) << now() << " bytes, and not " << before;
  });
  job.expect_success();
}

TEST(LentOverUcx, GivesTheErrorOfADeviceWithoutRoomToWhoeverReads) {
  RankProcesses job(2);
  start_on_devices(
      job, {kByItsTwin, kByItsTwin},
      [&](Transport& transport, Inbox& inbox) {
        if (transport.rank() == Rank(0)) {
          transport.send(Rank(1), object("large", there(bytes(64 << 20, 1))));
          transport.send(Rank(1), object("small", there(bytes(1 << 20, 2))));
          return job.await(0);
        }
        const auto large = inbox.next();
        EXPECT_THROW(large.body.as<at::Tensor>().add(1), c10::OutOfMemoryError);
        EXPECT_TRUE(at::equal(next(inbox), bytes(1 << 20, 2)));
        job.reach(0);
      },
      /*memory_of_the_second=*/"33554432");
  job.expect_success();
}

TEST(LentOverUcx, TellsWithinTwoSecondsOfAPeerThatIsKilledDuringACopy) {
  for (const int killed : {0, 1}) {  // the one that sends, the one that is sent to
    RankProcesses job(2);
    start_on_devices(job, {kByItsTwin, kByItsTwin}, [&](Transport& transport, Inbox& inbox) {
      const auto own = transport.rank().value;
      if (own == 0) {
        const auto large = there(bytes(64 << 20, 1));
        for (int i = killed == 0 ? 10'000 : 6; i > 0; --i) transport.send(Rank(1), object("large", large));
      } else {
        inbox.next();
        job.reach(0);                      // and others are under way
        if (own == killed) job.await(15);  // for ever
      }
      EXPECT_EQ(inbox.lost(Rank(killed)), "its process ended");
      job.reach(1);
    });
    expect_to_be_told_of(killed, job, 1);
  }
}

// Packets that are signed, and lend what they have not.
TEST(LentOverUcx, SkipsMalformedPacketsAndTheNextMessageArrives) {
  RankProcesses job(2);
  for (int rank = 0; rank < 2; ++rank) {
    job.start(rank, [&job, rank] {
      devices::set_rank_device({at::kPrivateUse1, static_cast<at::DeviceIndex>(rank)});
      auto options = job.options(rank);
      options.lends = kByItsTwin;
      const auto transport = open_ucx(options);
      auto& probe = dynamic_cast<ucx::Probe&>(*transport);
      Inbox inbox;
      transport->start(inbox.events());
      const std::vector<std::vector<std::uint32_t>> lists{{1}, {0}, {7, 7}, {0, 1}};
      if (rank == 1) {
        EXPECT_EQ(inbox.next().fields, "next");
        EXPECT_EQ(probe.dropped(), static_cast<std::int64_t>(2 * lists.size()));
      } else {
        const auto head = pack(object("lent", bytes(1 << 20, 0))).head;
        for (std::size_t i = 0; i < lists.size(); ++i) {
          std::string data = head;
          data.append(reinterpret_cast<const char*>(lists[i].data()), lists[i].size() * sizeof(std::uint32_t));
          ucx::PieceHeader header;
          header.sequence = i;
          header.head_size = head.size();
          header.lent = static_cast<std::uint32_t>(lists[i].size());
          header.digest = contact::digest(data);
          contact::Signer signer(probe.key(Rank(1)));
          header.sign(signer);
          probe.send_raw(Rank(1), {reinterpret_cast<const char*>(&header), sizeof header}, data);
        }
        for (std::size_t i = 0; i < lists.size(); ++i) transport->send(Rank(1), object("of a number that was", 1l));
        transport->send(Rank(1), object("next", 1l));
      }
      transport->close(true);
    });
  }
  job.expect_success();
}

}  // namespace
}  // namespace lamina::transport
