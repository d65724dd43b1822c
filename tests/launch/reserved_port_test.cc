// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/reserved_port.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

namespace lamina::launch {
namespace {

// As torch's store does it: all addresses of both families, SO_REUSEADDR, listening.
TEST(ReservedPort, AServerOfTheJobGetsIt) {
  const ReservedPort port;
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
  const ReservedPort port;
  const base::Fd stranger(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port.number());
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_NE(::bind(stranger.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
}

TEST(ReservedPort, TwoJobsGetTwo) {
  const ReservedPort one, two;
  EXPECT_NE(one.number(), two.number());
}

}  // namespace
}  // namespace lamina::launch
