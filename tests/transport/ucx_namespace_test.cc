// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"
#include "lamina/environment/address.h"
#include "lamina/rendezvous/place.h"
#include "lamina/transport/ucx/probe.h"
#include "tests/transport/rank_processes.h"

// Ranks in namespaces of their own, as containers have them. They are made by the ranks' processes, have no names, and
// end with them.
namespace lamina::transport {
namespace {

using base::Rank;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using testing::Inbox;
using ::testing::Not;
using testing::object;
using testing::RankProcesses;

const auto kSharesMemory = AnyOf(HasSubstr("posix/memory"), HasSubstr("sysv/memory"));

// Rights that the system gives to root alone it may give to nobody at all.
class UcxNamespaces : public ::testing::Test {
 protected:
  void SetUp() override {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(::unshare(CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWIPC) == 0 ? 0 : 1);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0) GTEST_SKIP() << "the system allows no namespaces";
  }
};

void enter_new(int kinds) {
  if (::unshare(kinds) != 0) throw base::Error(base::str("no namespace: ", base::system_error()));
}

void enter_network_of(pid_t process) {
  const base::Fd network(::open(base::str("/proc/", process, "/ns/net").c_str(), O_RDONLY | O_CLOEXEC));
  if (!network || ::setns(network.get(), CLONE_NEWNET) != 0) {
    throw base::Error(base::str("no network of ", process, ": ", base::system_error()));
  }
}

// UCX looks there for network devices, and finds those of the namespace in which it was mounted.
void mount_sys() {
  enter_new(CLONE_NEWNS);
  ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
  if (::mount("sysfs", "/sys", "sysfs", 0, nullptr) != 0)
    throw base::Error(base::str("no /sys: ", base::system_error()));
}

void ip(const std::string& words) {
  if (std::system(("ip " + words).c_str()) != 0) throw base::Error("ip " + words);
}

// A wire works a moment after its other end is up, too.
void await_wire(const std::string& device) {
  std::string state;
  for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30); state != "up";) {
    if (std::chrono::steady_clock::now() > end) throw base::TimeoutError(base::str(device, " is ", state));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::ifstream("/sys/class/net/" + device + "/operstate") >> state;
  }
}

// The first rank's network, which has a wire to that of `other`.
void lay_wire_to(pid_t other) {
  ip("link set lo up");
  ip(base::str("link add wire0 type veth peer name wire1 netns ", other));
  ip("addr add 10.77.0.1/24 dev wire0");
  ip("link set wire0 up");
}

void connect_wire() {
  ip("link set lo up");
  ip("addr add 10.77.0.2/24 dev wire1");
  ip("link set wire1 up");
}

std::string lanes(Transport& transport, int peer) { return dynamic_cast<ucx::Probe&>(transport).lanes(Rank(peer)); }

// Small and large messages to all others and back, of ranks that sleep meanwhile.
void talk(RankProcesses& job, UcxOptions options, const std::function<void(Transport&)>& look) {
  options.join_timeout = std::chrono::seconds(30);
  const auto transport = open_ucx(options);
  Inbox inbox;
  transport->start(inbox.events());
  for (int round = 0; round < 10; ++round) {
    for (int to = 0; to < options.size; ++to) {
      if (to == options.rank.value) continue;
      transport->send(Rank(to), object("c", std::string(round % 2 == 0 ? 10 : 100000, 'x')));
    }
    for (int from = 1; from < options.size; ++from) inbox.next();
  }
  job.reach(9);
  job.await(9, options.size);
  look(*transport);
  EXPECT_EQ(dynamic_cast<ucx::Probe&>(*transport).rescued(), 0);
  transport->close(true);
}

TEST_F(UcxNamespaces, RanksShareMemoryWithinANetworkNamespaceAndTalkOverTcpBetweenTwo) {
  RankProcesses job(3);
  const auto options = [&](int rank) {
    auto made = job.options(rank);
    made.master_addr = "10.77.0.1";
    return made;
  };
  job.start(2, [&] {
    enter_new(CLONE_NEWNET);
    mount_sys();
    job.reach(0);
    job.await(1);
    connect_wire();
    await_wire("wire1");
    job.reach(2);
    talk(job, options(2), [](Transport& transport) {
      EXPECT_THAT(lanes(transport, 0), HasSubstr("tcp"));
      EXPECT_THAT(lanes(transport, 0), Not(kSharesMemory));
      EXPECT_THAT(lanes(transport, 1), kSharesMemory);
    });
  });
  job.start(1, [&] {
    job.await(0);
    enter_network_of(job.process(2));
    mount_sys();
    job.await(2);
    await_wire("wire1");
    talk(job, options(1), [](Transport& transport) {
      EXPECT_THAT(lanes(transport, 0), HasSubstr("tcp"));
      EXPECT_THAT(lanes(transport, 0), Not(kSharesMemory));
      EXPECT_THAT(lanes(transport, 2), kSharesMemory);
    });
  });
  job.start(0, [&] {
    enter_new(CLONE_NEWNET);
    mount_sys();
    job.await(0);
    lay_wire_to(job.process(2));
    job.reach(1);
    await_wire("wire0");
    talk(job, options(0), [](Transport& transport) {
      for (const int peer : {1, 2}) {
        EXPECT_THAT(lanes(transport, peer), HasSubstr("tcp"));
        EXPECT_THAT(lanes(transport, peer), Not(kSharesMemory));
      }
    });
  });
  job.expect_success();
}

// Containers on their host's network: a loopback address reaches all, shared memory does not.
class UcxContainers : public UcxNamespaces, public ::testing::WithParamInterface<int> {};

TEST_P(UcxContainers, OnOneNetworkTalkOverItsLoopbackDevice) {
  RankProcesses job(2);
  for (const int rank : {0, 1}) {
    job.start(rank, [&, rank] {
      if (rank == 1) enter_new(GetParam());
      if (rank == 1 && GetParam() == CLONE_NEWNS) {
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
        EXPECT_EQ(::mount("tmpfs", "/dev/shm", "tmpfs", 0, nullptr), 0);
      }
      talk(job, job.options(rank), [rank](Transport& transport) {
        EXPECT_THAT(lanes(transport, 1 - rank), HasSubstr("tcp/lo"));
        EXPECT_THAT(lanes(transport, 1 - rank), Not(kSharesMemory));
      });
    });
  }
  job.expect_success();
}

INSTANTIATE_TEST_SUITE_P(WithTheirOwn, UcxContainers, ::testing::Values(CLONE_NEWIPC, CLONE_NEWNS),
                         [](const auto& kind) { return kind.param == CLONE_NEWIPC ? "Ipc" : "DevShm"; });

// A process that changes its network unnoticed: UCX's wake-ups do not reach it any more.
TEST_F(UcxNamespaces, AMessageThatNoWakeUpToldOfIsFoundCountedAndToldOfOnce) {
  RankProcesses job(2);
  job.start(0, [&] {
    auto options = job.options(0);
    int calls = 0;
    options.check_interrupt = [&] {
      if (++calls != 5) return;
      enter_new(CLONE_NEWNET);
      job.reach(0);
    };
    const auto transport = open_ucx(options);
    Inbox inbox;
    transport->start(inbox.events());
    ::testing::internal::CaptureStderr();
    for (std::int64_t i = 0; i < 3; ++i) {
      job.reach(1);
      EXPECT_EQ(inbox.next().body.as<std::int64_t>(), i);
    }
    EXPECT_GE(dynamic_cast<ucx::Probe&>(*transport).rescued(), 1);
    const std::string told = ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(told, HasSubstr("UCX did not wake this process for it"));
    EXPECT_EQ(told.find("a message waited"), told.rfind("a message waited"));
    transport->close(true);
  });
  job.start(1, [&] {
    job.await(0);
    const auto transport = open_ucx(job.options(1));
    Inbox inbox;
    transport->start(inbox.events());
    for (int i = 0; i < 3; ++i) {
      job.await(1, i + 1);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until the other one sleeps
      transport->send(Rank(0), object("c", std::int64_t{i}));
    }
    transport->close(true);
  });
  job.expect_success();
}

TEST_F(UcxNamespaces, RanksMeetWhereTheLoopbackDeviceHasNoIpv4Address) {
  RankProcesses job(2);
  const auto options = [&](int rank) {
    auto made = job.options(rank);
    made.master_addr = "::1";
    return made;
  };
  job.start(0, [&] {
    enter_new(CLONE_NEWNET);
    ip("link set lo up");
    ip("addr del 127.0.0.1/8 dev lo");
    job.reach(0);
    talk(job, options(0), [](Transport& transport) { EXPECT_THAT(lanes(transport, 1), kSharesMemory); });
  });
  job.start(1, [&] {
    job.await(0);
    enter_network_of(job.process(0));
    talk(job, options(1), [](Transport& transport) { EXPECT_THAT(lanes(transport, 0), kSharesMemory); });
  });
  job.expect_success();
}

TEST(Place, IsTheSameWithinAProcessAndSharedWithNobodyWhereItCannotBeTold) {
  EXPECT_NE(rendezvous::own_place(), "");
  EXPECT_TRUE(rendezvous::share_memory(rendezvous::own_place(), rendezvous::own_place()));
  EXPECT_FALSE(rendezvous::share_memory("", ""));
  EXPECT_FALSE(rendezvous::share_memory(rendezvous::own_place(), rendezvous::own_place() + "x"));
}

}  // namespace
}  // namespace lamina::transport
