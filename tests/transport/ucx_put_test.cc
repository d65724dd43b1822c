// SPDX-License-Identifier: Apache-2.0
// Bytes that go straight into posted memory: [Note: puts].
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/transport/ucx/probe.h"
#include "lamina/transport/ucx/wire.h"
#include "tests/message_of.h"
#include "tests/transport/rank_processes.h"

namespace lamina::transport {
namespace {

using base::Rank;
using ::testing::HasSubstr;
using testing::Inbox;
using testing::object;
using testing::RankProcesses;
using Transfers = std::vector<std::unique_ptr<Transfer>>;

constexpr std::int64_t kSizes[] = {0, 1, 63, 4096, 8192, 8193, 60000, 1 << 20, 64 << 20};

base::Patience patience(std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  return {timeout, [] {}};
}

at::Tensor pattern(std::int64_t bytes, std::int64_t seed) {
  return at::arange(seed, seed + bytes, at::kInt).to(at::kByte);
}
at::Tensor nines(std::int64_t bytes) { return at::full({bytes}, 9, at::kByte); }

// Run over shared memory, and over TCP as between hosts.
class UcxPut : public ::testing::TestWithParam<const char*> {
 protected:
  static void run(RankProcesses& job, const RankProcesses::Body& body) {
    if (*GetParam() != '\0') ::setenv("UCX_TLS", GetParam(), 1);
    job.run(body);
    ::unsetenv("UCX_TLS");
  }
};
// Sockets of this process that anybody may connect to over a network: /proc/net/tcp has addresses in hexadecimal.
std::vector<std::string> listening_elsewhere_than_at_loopback() {
  std::set<std::string> own;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed;
    own.insert(std::filesystem::read_symlink(entry, closed).string());
  }
  std::vector<std::string> found;
  std::ifstream table("/proc/net/tcp");
  for (std::string line; std::getline(table, line);) {
    std::istringstream words(line);
    std::string number, local, remote, state, word, inode;
    words >> number >> local >> remote >> state;
    for (int i = 0; i < 6; ++i) words >> inode;
    if (state == "0A" && !local.starts_with("0100007F") && own.contains("socket:[" + inode + "]"))
      found.push_back(local);
  }
  return found;
}

TEST(UcxTcp, OfAJobOnOneMachineListensOnTheLoopbackDeviceAlone) {
  RankProcesses job(2);
  ::setenv("UCX_TLS", "tcp,self", 1);
  job.run([&](Transport& transport, Inbox& inbox) {
    transport.send(Rank(1 - transport.rank().value), object("c", 1l));
    inbox.next();
    EXPECT_THAT(listening_elsewhere_than_at_loopback(), ::testing::IsEmpty());
  });
  ::unsetenv("UCX_TLS");
  job.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Over, UcxPut, ::testing::Values("", "tcp,self"),
                         [](const auto& info) { return *info.param == '\0' ? "SharedMemory" : "Tcp"; });

TEST_P(UcxPut, BytesOfAllSizesComeToTheirPlacesWhicheverEndIsFirst) {
  RankProcesses job(2);
  run(job, [&](Transport& transport, Inbox&) {
    const int me = static_cast<int>(transport.rank().value);
    const Rank other(1 - me);
    int meetings = 0;
    const auto meet = [&] {
      job.reach(0);
      job.await(0, 2 * ++meetings);
    };
    for (const bool puts_first : {true, false}) {
      for (const auto size : kSizes) {
        const auto name = base::str(size, puts_first);
        const auto whole = nines(size + 2), to = whole.narrow(0, 1, size), from = pattern(size, me);
        Transfers transfers;
        const auto put = [&] { transfers.push_back(transport.put(other, {name, "bytes", from})); };
        const auto post = [&] { transfers.push_back(transport.post(other, {name, "bytes", to})); };
        puts_first ? put() : post();
        meet();
        puts_first ? post() : put();
        for (const auto& transfer : transfers) transfer->wait(patience());
        EXPECT_TRUE(at::equal(to, pattern(size, other.value))) << size;
        EXPECT_EQ(whole[0].item<int>() + whole[size + 1].item<int>(), 18);
      }
    }
  });
  job.expect_success();
}

TEST_P(UcxPut, ManyAreUnderWayAtOnceAmongSeveralRanks) {
  constexpr int kEach = 40;
  RankProcesses job(3);
  run(job, [&](Transport& transport, Inbox&) {
    const auto me = transport.rank().value;
    std::vector<std::pair<at::Tensor, at::Tensor>> expected;
    Transfers posts, puts;
    for (int i = 0; i < kEach; ++i) {
      const auto size = kSizes[(i * 7) % 8];
      for (int peer = 0; peer < 3; ++peer) {  // itself, too
        puts.push_back(transport.put(Rank(peer), {base::str(i), "bytes", pattern(size, me + i)}));
      }
    }
    for (int i = kEach - 1; i >= 0; --i) {
      const auto size = kSizes[(i * 7) % 8];
      for (int peer = 0; peer < 3; ++peer) {
        expected.emplace_back(nines(size), pattern(size, peer + i));
        posts.push_back(transport.post(Rank(peer), {base::str(i), "bytes", expected.back().first}));
      }
    }
    for (const auto& each : {&posts, &puts}) {
      for (const auto& transfer : *each) transfer->wait(patience());
    }
    for (const auto& [got, right] : expected) EXPECT_TRUE(at::equal(got, right));
  });
  job.expect_success();
}

TEST_P(UcxPut, EndsThatDifferAreAnErrorOnBothAndNothingIsWritten) {
  struct Case {
    std::int64_t put, posted;
    const char* meaning;
  };
  constexpr Case kCases[] = {{1, 2, "float"}, {2, 1, "float"},      {100000, 99999, "float"}, {8, 0, "float"},
                             {0, 8, "float"}, {100000, 8, "float"}, {400, 400, "int"},        {100000, 100000, "int"}};
  RankProcesses job(2);
  run(job, [&](Transport& transport, Inbox&) {
    int number = 0;
    for (const bool put_first : {true, false}) {
      for (const auto& [put, posted, meaning] : kCases) {
        const auto name = base::str("case ", ++number);
        const bool sends = transport.rank() == Rank(0);
        const auto memory = nines(sends ? put : posted);
        if (sends != put_first) job.await(7, number);
        const auto transfer =
            sends ? transport.put(Rank(1), {name, "float", memory}) : transport.post(Rank(0), {name, meaning, memory});
        if (sends == put_first) job.reach(7);
        const auto text = message_of<base::DesyncError>([&] { transfer->wait(patience()); });
        EXPECT_THAT(text, HasSubstr(base::str(name, ": rank 0 gives ", put, " bytes (float), rank 1 takes ", posted,
                                              " (", meaning, ")")));
        EXPECT_TRUE(at::equal(memory, nines(memory.numel())));
      }
    }
    const auto to = nines(5);  // the two go on
    const Rank other(1 - transport.rank().value);
    const auto post = transport.post(other, {"after", "", to}),
               put = transport.put(other, {"after", "", pattern(5, 1)});
    post->wait(patience());
    put->wait(patience());
    EXPECT_TRUE(at::equal(to, pattern(5, 1)));
  });
  job.expect_success();
}

TEST_P(UcxPut, WhatIsPostedAndGivenUpIsNeverWrittenAndItsPutIsTold) {
  RankProcesses job(2);
  run(job, [&](Transport& transport, Inbox&) {
    int number = 0;
    for (const std::int64_t size : {10, 100000}) {
      const auto name = base::str("given up ", ++number);
      if (transport.rank() == Rank(0)) {
        const auto to = nines(size);
        {
          const auto post = transport.post(Rank(1), {name, "", to});
          EXPECT_THROW(post->wait(patience(std::chrono::milliseconds(100))), base::TimeoutError);
        }
        job.reach(0);
        job.await(1, number);
        EXPECT_TRUE(at::equal(to, nines(size)));
      } else {
        job.await(0, number);
        const auto put = transport.put(Rank(0), {name, "", pattern(size, 1)});
        const auto text = message_of<base::CancelledError>([&] { put->wait(patience()); });
        EXPECT_EQ(text, name + ": rank 0 has given it up");
        job.reach(1);
      }
    }
  });
  job.expect_success();
}

TEST_P(UcxPut, APutThatIsGivenUpMayStillArrive) {
  RankProcesses job(2);
  run(job, [&](Transport& transport, Inbox&) {
    if (transport.rank() == Rank(0)) {
      auto put = transport.put(Rank(1), {"late", "", pattern(1 << 20, 3)});
      EXPECT_THROW(put->wait(patience(std::chrono::milliseconds(100))), base::TimeoutError);
      put.reset();
      job.reach(0);
      job.await(1);
    } else {
      job.await(0);
      const auto to = nines(1 << 20);
      transport.post(Rank(0), {"late", "", to})->wait(patience());
      EXPECT_TRUE(at::equal(to, pattern(1 << 20, 3)));
      job.reach(1);
    }
  });
  job.expect_success();
}

TEST_P(UcxPut, AWaitEndsByItsInterrupt) {
  RankProcesses job(2);
  run(job, [&](Transport& transport, Inbox&) {
    const auto post = transport.post(Rank(1 - transport.rank().value), {"never", "", nines(5)});
    base::Patience interrupted{std::chrono::seconds(30), [] { throw base::UsageError("interrupted"); }};
    EXPECT_THROW(post->wait(interrupted), base::UsageError);
    job.reach(0);
    job.await(0, 2);
  });
  job.expect_success();
}

// The receipts of puts arrive before the end of who wrote them does.
TEST_P(UcxPut, ARankMayLeaveAsSoonAsItsOwnEndsAreOver) {
  RankProcesses job(2);
  run(job, [&](Transport& transport, Inbox&) {
    const Rank other(1 - transport.rank().value);
    const auto to = nines(100000);
    const auto post = transport.post(other, {"last", "", to});
    if (transport.rank() == Rank(0)) {
      const auto put = transport.put(other, {"last", "", pattern(100000, 1)});
      put->wait(patience());
    } else {
      post->wait(patience());
    }
  });
  job.expect_success();
}

TEST_P(UcxPut, ARankMayLeaveWithTransfersUnderWay) {
  RankProcesses job(2);
  run(job, [&](Transport& transport, Inbox&) {
    const Rank other(1 - transport.rank().value);
    for (const std::int64_t size : {10, 100000}) {
      const auto post = transport.post(other, {base::str("posted ", size), "", nines(size)});
      const auto put = transport.put(other, {base::str("put ", size), "", nines(size)});
    }
  });
  job.expect_success();
}

TEST_P(UcxPut, ALostRankEndsTheWaitsOfBothEndsWithinTwoSeconds) {
  RankProcesses job(2);
  std::chrono::steady_clock::time_point killed;
  run(job, [&](Transport& transport, Inbox&) {
    const Rank other(1 - transport.rank().value);
    const auto early = transport.post(other, {"early", "", nines(100)});
    if (transport.rank() == Rank(1)) {
      transport.put(other, {"early", "", pattern(100, 1)})->wait(patience());
      job.await(0);
      ::raise(SIGKILL);
    }
    early->wait(patience());  // what came before stays
    const auto post = transport.post(other, {"a", "", nines(1 << 20)});
    const auto put = transport.put(other, {"b", "", nines(1 << 20)});
    job.reach(0);
    job.reach(1);
    for (const auto& transfer : {&post, &put}) {
      const auto text = message_of<base::PeerError>([&] { (*transfer)->wait(patience()); });
      EXPECT_THAT(text, HasSubstr("rank 1 is lost: its process ended"));
    }
    EXPECT_THROW(transport.put(other, {"c", "", nines(10)})->wait(patience()), base::PeerError);
    job.reach(2);
  });
  job.await(1);
  killed = std::chrono::steady_clock::now();
  job.await(2);
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(2));
  EXPECT_EQ(job.wait(1), SIGKILL);
  job.expect_success();
}

// The kill falls at a random moment into bytes that go both ways. Over TCP the survivors go on; in shared memory a dead
// sender may have left its message half written in a queue of UCX's, behind which all others of that receiver stay.
class UcxPutLoss : public ::testing::TestWithParam<int> {};

TEST_P(UcxPutLoss, SurvivorsGetPeerError) {
  const std::int64_t size = GetParam() % 3 == 0 ? 2000 : GetParam() % 3 == 1 ? 300000 : 32 << 20;
  RankProcesses job(3);
  const bool tcp = GetParam() % 2 == 0;
  if (tcp) ::setenv("UCX_TLS", "tcp,self", 1);
  job.run([&](Transport& transport, Inbox& inbox) {
    const int me = static_cast<int>(transport.rank().value);
    const auto to = nines(size), from = nines(size);
    const auto exchange = [&](int round) {
      Transfers transfers;
      for (int peer = 0; peer < 3; ++peer) {
        if (peer == me) continue;
        transfers.push_back(transport.post(Rank(peer), {base::str(round), "", nines(size)}));
        transfers.push_back(transport.put(Rank(peer), {base::str(round), "", from}));
      }
      auto all = patience();  // the first error of any of them ends the wait
      all.check_interrupt = [&] {
        for (const auto& transfer : transfers) {
          if (transfer->done()) transfer->wait(patience());
        }
      };
      for (const auto& transfer : transfers) transfer->wait(all);
    };
    job.reach(0);
    const auto text = message_of<base::Error>([&] {
      for (int round = 0;; ++round) exchange(round);
    });
    EXPECT_TRUE(text.find("rank 1 is lost: its process ended") != std::string::npos ||
                text.find("has given it up") != std::string::npos)  // by the other survivor
        << text;
    EXPECT_EQ(inbox.lost(Rank(1)), "its process ended");
    job.reach(1);
    job.await(1, 2);
    if (!tcp) {
      transport.close(false);
      ::_exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    const Rank other(2 - me);
    const auto after = nines(10);
    const auto post = transport.post(other, {"after", "", after}),
               put = transport.put(other, {"after", "", pattern(10, 1)});
    post->wait(patience());
    put->wait(patience());
    EXPECT_TRUE(at::equal(after, pattern(10, 1)));
  });
  ::unsetenv("UCX_TLS");
  job.await(0, 3);
  std::this_thread::sleep_for(std::chrono::microseconds(20000 + 7919 * GetParam() % 30000));
  job.kill(1, SIGKILL);
  EXPECT_EQ(job.wait(1), SIGKILL);
  job.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Moments, UcxPutLoss, ::testing::Range(0, 12));

TEST(UcxPutForged, WhatIsNotSignedOrCameBeforeIsDroppedAndTheTruePutArrives) {
  RankProcesses job(2);
  job.run([&](Transport& transport, Inbox&) {
    auto& probe = dynamic_cast<ucx::Probe&>(transport);
    constexpr std::int64_t kSize = 64;
    if (transport.rank() == Rank(1)) {
      const auto to = nines(kSize), again = nines(kSize);
      transport.post(Rank(0), {"true", "t", to})->wait(patience());
      EXPECT_TRUE(at::equal(to, pattern(kSize, 0)));
      const auto post = transport.post(Rank(0), {"true", "t", again});
      job.reach(0);
      job.await(1);
      EXPECT_THROW(post->wait(patience(std::chrono::milliseconds(100))), base::TimeoutError);
      EXPECT_TRUE(at::equal(again, nines(kSize)));
      job.reach(2);
      EXPECT_EQ(probe.dropped(), 3 + static_cast<std::int64_t>(sizeof(ucx::PieceHeader)) + 5);
      return;
    }
    const std::string text = "truet", data(kSize, 'x');
    ucx::PieceHeader header;
    const auto with_text = [&](const std::string& words) {
      contact::Signer signer(probe.key(Rank(1)));
      header.sign(signer);
      return std::string(reinterpret_cast<const char*>(&header), sizeof header) + words;
    };
    const auto put_raw = [&](const std::string& head, const std::string& bytes) {
      probe.send_raw(Rank(1), head, bytes, ucx::kPut);
    };
    put_raw("short", data);
    put_raw(std::string(sizeof header, '\0'), data);
    put_raw(std::string(sizeof header, '\0'), std::string(100000, 'x'));
    header.id = ucx::kPut;
    header.head_size = kSize;
    header.piece = 4;
    header.digest = contact::digest(text);
    const std::string right = with_text(text);
    for (std::size_t at = 0; at < sizeof header; ++at) {  // a byte of the header changed
      std::string changed = right;
      changed[at] ^= 1;
      put_raw(changed, data);
    }
    put_raw(with_text("TrueT"), data);
    put_raw(right, data + "x");
    put_raw(right, "");
    header.id = ucx::kPiece;  // a piece of a message is no put
    put_raw(with_text(text), data);
    transport.put(Rank(1), {"true", "t", pattern(kSize, 0)})->wait(patience());
    put_raw(right, data);  // its number has come
    job.await(0);
    job.reach(1);
    job.await(2);
  });
  job.expect_success();
}

}  // namespace
}  // namespace lamina::transport
