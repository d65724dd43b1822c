// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/reserved_port.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

namespace lamina::launch {
namespace {

// As torch's store does it: all addresses of both families, SO_REUSEADDR, listening.
TEST(ReservedPort, AServerOfTheJobGetsIt) {
  const ReservedPort port("127.0.0.1");
  const base::Fd server(::socket(AF_INET6, SOCK_STREAM, 0));
  if (!server) return;  // a machine without IPv6
  const int yes = 1, no = 0;
  ::setsockopt(server.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  ::setsockopt(server.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_port = htons(port.number());
  ASSERT_EQ(::bind(server.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(server.get(), 8), 0);
}

TEST(ReservedPort, NobodyElseIsGivenIt) {
  const ReservedPort port("127.0.0.1");
  const base::Fd stranger(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port.number());
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_NE(::bind(stranger.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
}

TEST(ReservedPort, TwoJobsGetTwo) {
  const ReservedPort one("127.0.0.1"), two("127.0.0.1");
  EXPECT_NE(one.number(), two.number());
}

// A process in a network namespace of its own, whose loopback device is up and has no address of IPv4.
TEST(ReservedPort, IsOneOfIpv6WhereThatIsAllThereIs) {
  if (::system("unshare -n true 2>/dev/null") != 0) GTEST_SKIP() << "the system allows no namespaces";
  const pid_t child = ::fork();
  if (child == 0) {
    const bool alone =
        ::unshare(CLONE_NEWNET) == 0 && ::system("ip link set lo up; ip addr del 127.0.0.1/8 dev lo") == 0;
    const ReservedPort port("127.0.0.1"), other("::1");
    ::_exit(alone && port.master() == "::1" && port.number() != other.number() && !is_taken("::1", 1) ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(ReservedPort, IsOneOfTheFamilyThatWasAskedFor) {
  EXPECT_EQ(ReservedPort("127.0.0.1").master(), "127.0.0.1");
  EXPECT_EQ(ReservedPort("::1").master(), "::1");
  EXPECT_EQ(ReservedPort("localhost").master(), "localhost");
}

}  // namespace
}  // namespace lamina::launch
