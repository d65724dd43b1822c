// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstring>
#include <ctime>
#include <map>
#include <random>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/ucx/probe.h"
#include "lamina/transport/ucx/wire.h"
#include "tests/transport/rank_processes.h"

namespace lamina::transport {
namespace {

using base::Rank;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::Inbox;
using ::testing::Not;
using testing::object;
using testing::RankProcesses;
using value::List;

const std::vector<std::int64_t> kSizes = {0, 1, 63, 4096, 8192, 8193, 60000, 1 << 20, 64 << 20};

at::Tensor pattern(std::int64_t bytes, std::int64_t seed) {
  return at::arange(seed, seed + bytes, at::kInt).to(at::kByte);
}

std::int64_t integer(const value::Value& tree, std::size_t at) {
  return tree.as<List>().items.at(at).as<std::int64_t>();
}
const at::Tensor& tensor(const value::Value& tree, std::size_t at) {
  return tree.as<List>().items.at(at).as<at::Tensor>();
}

TEST(Ucx, TwoRanksExchangeTensorsOfAllSizes) {
  RankProcesses job(2);
  job.run([](Transport& transport, Inbox& inbox) {
    const std::int64_t me = transport.rank().value;
    const Rank other(1 - me);
    std::thread sender([&] {
      for (const auto size : kSizes) transport.send(other, object("c", List{{size, pattern(size, me)}}));
    });
    for (const auto size : kSizes) {
      const Message message = inbox.next();
      EXPECT_EQ(message.fields, "c");
      EXPECT_EQ(integer(message.body, 0), size);
      EXPECT_TRUE(at::equal(tensor(message.body, 1), pattern(size, other.value))) << size;
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor(message.body, 1).const_data_ptr()) % 64, 0);
    }
    sender.join();
  });
  job.expect_success();
}

// Several threads of three ranks send to all, themselves included; each (sender, thread) stays in order.
TEST(Ucx, ConcurrentThreadsKeepOrderAndValues) {
  constexpr int kThreads = 3;
  constexpr std::int64_t kMessages = 60;
  RankProcesses job(3);
  job.run([&](Transport& transport, Inbox& inbox) {
    const std::int64_t me = transport.rank().value;
    std::vector<std::thread> senders;
    for (std::int64_t thread = 0; thread < kThreads; ++thread) {
      senders.emplace_back([&, thread] {
        for (std::int64_t i = 0; i < kMessages; ++i) {
          for (int to = 0; to < 3; ++to) {
            const auto size = kSizes[static_cast<std::size_t>(i * 7 + thread + to) % (kSizes.size() - 1)];
            transport.send(Rank(to), object("c", List{{me, thread, i, pattern(size, me + thread + i)}}));
          }
        }
      });
    }
    std::map<std::pair<std::int64_t, std::int64_t>, std::int64_t> next;
    for (std::int64_t n = 0; n < 3 * kThreads * kMessages; ++n) {
      const value::Value body = inbox.next().body;
      const auto from = integer(body, 0), thread = integer(body, 1), i = integer(body, 2);
      EXPECT_EQ(i, (next[{from, thread}]++));
      const at::Tensor& got = tensor(body, 3);
      EXPECT_TRUE(at::equal(got, pattern(got.numel(), from + thread + i)));
    }
    for (auto& sender : senders) sender.join();
    job.reach(0);
    job.await(0, 3);
    EXPECT_EQ(inbox.waiting(), 0);
  });
  job.expect_success();
}

TEST(Ucx, EndpointsAreThoseToNeighboursAndToRanksThatThisOneHasSentTo) {
  RankProcesses job(6);
  job.run([&](Transport& transport, Inbox& inbox) {
    const int across = (transport.rank().value + 3) % 6;
    auto& probe = dynamic_cast<ucx::Probe&>(transport);
    EXPECT_EQ(probe.endpoints(), 2);
    for (int i = 0; i < 3; ++i) transport.send(Rank(across), object("c", pattern(100'000, i)));  // has a receipt
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(inbox.next().body.as<at::Tensor>(), pattern(100'000, i)));
    job.reach(0);
    job.await(0, 6);
    EXPECT_EQ(probe.endpoints(), 3);
    transport.tell(Rank((across + 1) % 6), object("told", 1l));
    EXPECT_EQ(inbox.next().fields, "told");
    EXPECT_EQ(probe.endpoints(), 4);
  });
  job.expect_success();
}

TEST(Ucx, ARankThatCannotBeReachedIsNamedAtItsFirstUse) {
  RankProcesses job(4);
  const std::array transports{"posix", "posix,tcp", "tcp", "posix,tcp"};
  for (const int rank : {0, 1, 2, 3}) {
    job.start(rank, [&, rank] {
      ::setenv("UCX_TLS", transports[static_cast<std::size_t>(rank)], 1);
      const auto transport = open_ucx(job.options(rank));
      Inbox inbox;
      transport->start(inbox.events());
      const Rank other((rank + 2) % 4);
      const auto reach = [&](const auto& call) {
        try {
          call();
          ADD_FAILURE() << "it was reached";
        } catch (const base::Error& error) {
          EXPECT_NE(std::string(error.what()).find(base::str("rank ", other)), std::string::npos) << error.what();
        }
      };
      if (rank % 2 == 0) {
        reach([&] { transport->tell(other, object("c", 1l)); });
        reach([&] { transport->send(other, object("c", pattern(100, 1))); });
      }
      job.reach(0);
      job.await(0, 4);
      transport->close(true);
    });
  }
  job.expect_success();
}

TEST(Ucx, ABufferMayBeWrittenOnceSendReturns) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    for (const auto size : kSizes) {
      for (int to = 0; to < 2; ++to) {
        const at::Tensor sent = at::full({size}, 1, at::kByte);
        transport.send(Rank(to), object("c", sent));
        sent.fill_(2);
      }
      for (int from = 0; from < 2; ++from) {
        const at::Tensor got = inbox.next().body.as<at::Tensor>();
        EXPECT_TRUE(at::equal(got, at::full_like(got, 1))) << got.numel();
      }
    }
  });
  job.expect_success();
}

TEST(Ucx, TensorsThatShareStorageDoSoAfterwards) {
  RankProcesses job(2);
  job.run([](Transport& transport, Inbox& inbox) {
    if (transport.rank() == Rank(0)) {
      const at::Tensor whole = at::full({100000}, 1.0f);
      transport.send(Rank(1), object("c", List{{whole, whole.slice(0, 10, 20)}}));
      return;
    }
    const value::Value body = inbox.next().body;
    tensor(body, 0).fill_(7);
    EXPECT_EQ(tensor(body, 1).sum().item<float>(), 70);
  });
  job.expect_success();
}

TEST(Ucx, MessagesWaitForStart) {
  RankProcesses job(2);
  for (int rank = 0; rank < 2; ++rank) {
    job.start(rank, [&, rank] {
      const auto transport = open_ucx(job.options(rank));
      transport->send(Rank(1 - rank), object("early", pattern(1 << 20, 0)));
      job.reach(0);
      job.await(0, 2);
      Inbox inbox;
      transport->start(inbox.events());
      EXPECT_EQ(inbox.next().fields, "early");
      transport->close(true);
    });
  }
  job.expect_success();
}

TEST(Ucx, OneProcessMayJoinAgainAndAgain) {
  RankProcesses job(2);
  for (int rank = 0; rank < 2; ++rank) {
    job.start(rank, [&, rank] {
      for (std::int64_t round = 0; round < 4; ++round) {
        const auto transport = open_ucx(job.options(rank));
        Inbox inbox;
        transport->start(inbox.events());
        transport->send(Rank(1 - rank), object("c", List{{round, pattern(100000, round)}}));
        EXPECT_EQ(integer(inbox.next().body, 0), round);
        transport->close(round % 2 == 0);
        transport->close(true);
        EXPECT_THROW(transport->send(Rank(1 - rank), object("c", 1l)), base::InternalError);
      }
    });
  }
  job.expect_success();
}

TEST(Ucx, AWorldOfOneNeedsNobody) {
  RankProcesses job(1);
  job.start(0, [] {
    const auto transport = open_ucx({});
    Inbox inbox;
    transport->start(inbox.events());
    transport->send(Rank(0), object("c", pattern(100000, 3)));
    EXPECT_TRUE(at::equal(inbox.next().body.as<at::Tensor>(), pattern(100000, 3)));
    transport->close(true);
  });
  job.expect_success();
}

double processor_seconds() {
  timespec used;
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
}

// Looking out is for a moment: the processor is free again soon after, whether or not a message came.
TEST(Ucx, WhoLooksOutGetsItsMessageAndThenSleeps) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    const Rank other(1 - transport.rank().value);
    for (std::int64_t i = 0; i < 200; ++i) {
      if (transport.rank().value == 0) transport.send(other, object("c", i));
      transport.look_out();
      EXPECT_EQ(inbox.next().body.as<std::int64_t>(), i);
      if (transport.rank().value == 1) transport.send(other, object("c", i));
    }
    transport.look_out();
    const double before = processor_seconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    EXPECT_LT(processor_seconds() - before, 0.1);
  });
  job.expect_success();
}

TEST(Ucx, UsesSharedMemoryAndNoNetwork) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    transport.send(Rank(1 - transport.rank().value), object("c", 1l));
    inbox.next();
    const std::string lanes = dynamic_cast<ucx::Probe&>(transport).lanes(Rank(1 - transport.rank().value));
    EXPECT_THAT(lanes, AnyOf(HasSubstr("posix/memory"), HasSubstr("sysv/memory")));
    EXPECT_THAT(lanes, Not(HasSubstr("tcp")));
  });
  job.expect_success();
}

TEST(Ucx, LeavesSignalHandlersAlone) {
  RankProcesses job(1);
  job.start(0, [] {
    const auto handlers = [] {
      std::vector<void (*)(int)> all;
      for (const int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL, SIGINT, SIGTERM, SIGCHLD}) {
        struct sigaction action{};
        ::sigaction(signal, nullptr, &action);
        all.push_back(action.sa_handler);
      }
      return all;
    };
    const auto before = handlers();
    open_ucx({})->close(true);
    EXPECT_EQ(handlers(), before);
  });
  job.expect_success();
}

TEST(Ucx, ForgedAndMalformedPiecesAreDroppedAndTheNextMessageArrives) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    auto& probe = dynamic_cast<ucx::Probe&>(transport);
    if (transport.rank() == Rank(0)) {
      const std::string unsigned_header(sizeof(ucx::PieceHeader), '\0');
      for (const std::size_t size : {0, 1, 100, 100000}) {
        probe.send_raw(Rank(1), unsigned_header, std::string(size, 'x'));
      }
      probe.send_raw(Rank(1), "short", "data");
      transport.send(Rank(1), object("after", 1l));
      return;
    }
    EXPECT_EQ(inbox.next().fields, "after");
    EXPECT_EQ(probe.dropped(), 5);
  });
  job.expect_success();
}

TEST(Ucx, AHundredThousandForgedPiecesAreDroppedAndTheNextMessageArrives) {
  constexpr std::int64_t kPieces = 100000;
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    auto& probe = dynamic_cast<ucx::Probe&>(transport);
    if (transport.rank() == Rank(1)) {
      EXPECT_EQ(inbox.next().fields, "after");
      EXPECT_EQ(probe.dropped(), kPieces);
      return;
    }
    std::mt19937_64 random(5);
    for (std::int64_t i = 0; i < kPieces; ++i) {
      std::string header(random() % 8 == 0 ? random() % 64 : sizeof(ucx::PieceHeader), '\0');
      for (char& byte : header) byte = static_cast<char>(random() % 3 == 0 ? random() : 0);
      const ucx::PieceHeader right;
      if (random() % 2 == 0) std::memcpy(header.data(), &right.magic, std::min(header.size(), sizeof right.magic));
      probe.send_raw(Rank(1), header, std::string(random() % 300, 'x'));
    }
    transport.send(Rank(1), object("after", 1l));
  });
  job.expect_success();
}

// A message as a packet without large buffers, as rank 0 would send it as its `sequence`-th.
struct Packet {
  ucx::PieceHeader header;
  std::string data;

  Packet(const Message& message, std::uint64_t sequence) {
    data = pack(message).head;
    header.sequence = sequence;
    header.head_size = data.size();
    header.digest = contact::digest(data);
  }
  std::string signed_with(const contact::Secret& key) {
    contact::Signer signer(key);
    header.sign(signer);
    return std::string(reinterpret_cast<const char*>(&header), sizeof header);
  }
};

TEST(Ucx, WhatCameOnceDoesNotCountAgain) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    auto& probe = dynamic_cast<ucx::Probe&>(transport);
    if (transport.rank() == Rank(1)) {
      for (const char* channel : {"first", "second", "after"}) EXPECT_EQ(inbox.next().fields, channel);
      EXPECT_EQ(probe.dropped(), 3);
      EXPECT_EQ(inbox.waiting(), 0);
      return;
    }
    transport.send(Rank(1), object("first", 1l));
    transport.send(Rank(1), object("second", 1l));
    for (const std::uint64_t sequence : {0, 1, 0}) {
      Packet again(object(sequence == 0 ? "first" : "second", 1l), sequence);
      probe.send_raw(Rank(1), again.signed_with(probe.key(Rank(1))), again.data);
    }
    transport.send(Rank(1), object("after", 1l));
  });
  job.expect_success();
}

TEST(Ucx, WhatIsNotSignedByItsSenderIsDroppedAndTheTrueMessageArrives) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    auto& probe = dynamic_cast<ucx::Probe&>(transport);
    constexpr int kOthers = 6;
    if (transport.rank() == Rank(1)) {
      const Message message = inbox.next();
      EXPECT_EQ(message.fields, "true");
      EXPECT_EQ(message.body.as<std::int64_t>(), 1);
      EXPECT_EQ(probe.dropped(), static_cast<std::int64_t>(sizeof(ucx::PieceHeader)) + kOthers);
      return;
    }
    const contact::Secret key = probe.key(Rank(1));
    Packet packet(object("true", 2l), 0);
    const std::string header = packet.signed_with(key);
    for (std::size_t at = 0; at < header.size(); ++at) {  // a byte of the header changed
      std::string changed = header;
      changed[at] ^= 1;
      probe.send_raw(Rank(1), changed, packet.data);
    }
    std::string data = packet.data;  // a byte of the head, behind a header that is right
    data.back() ^= 1;
    probe.send_raw(Rank(1), header, data);
    probe.send_raw(Rank(1), header, data.substr(1));
    Packet offer(object("true", pattern(1 << 20, 0)), 0);  // and so is the address of memory that is offered
    offer.data += std::string(8, 'a');
    offer.header.offers = 1;
    offer.header.digest = contact::digest(offer.data);
    offer.data.back() = 'b';
    probe.send_raw(Rank(1), offer.signed_with(key), offer.data);
    contact::Secret other_job = key;
    other_job[0] ^= 1;
    probe.send_raw(Rank(1), packet.signed_with(other_job), packet.data);
    packet.header.from = 1;  // as if it had sent it itself
    probe.send_raw(Rank(1), packet.signed_with(key), packet.data);
    packet.header.from = 0;
    packet.header.answer = ucx::PutOutcome::kTaken;  // a receipt is no piece
    probe.send_raw(Rank(1), packet.signed_with(key), packet.data);
    transport.send(Rank(1), object("true", 1l));
  });
  job.expect_success();
}

TEST(Ucx, ABufferOfADeviceForARankThatLendsNothingIsSkippedAndTheNextMessageArrives) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox& inbox) {
    auto& probe = dynamic_cast<ucx::Probe&>(transport);
    if (transport.rank() == Rank(1)) {
      EXPECT_EQ(inbox.next().fields, "next");
      EXPECT_EQ(probe.dropped(), 2);
      return;
    }
    Packet lends(object("lent", pattern(1 << 20, 0)), 0);
    lends.data += std::string(sizeof(std::uint32_t), '\0');
    lends.header.lent = 1;
    lends.header.digest = contact::digest(lends.data);
    probe.send_raw(Rank(1), lends.signed_with(probe.key(Rank(1))), lends.data);
    transport.send(Rank(1), object("of the same number", 1l));
    transport.send(Rank(1), object("next", 1l));
  });
  job.expect_success();
}

TEST(Ucx, ConnectionsOfOneRankHaveKeysOfTheirOwn) {
  RankProcesses job(3);
  job.run([&](Transport& transport, Inbox&) {
    auto& probe = dynamic_cast<ucx::Probe&>(transport);
    const int me = static_cast<int>(transport.rank().value);
    EXPECT_NE(probe.key(Rank((me + 1) % 3)), probe.key(Rank((me + 2) % 3)));
  });
  job.expect_success();
}

}  // namespace
}  // namespace lamina::transport
