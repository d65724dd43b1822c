// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include "lamina/base/fd.h"

namespace lamina::test {

// A port that only those get who ask for it, until this object ends: its socket stays bound and never listens. A port
// that is only looked for and let go may be another process's before rank 0 listens there.
class ReservedPort {
 public:
  ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    socklen_t length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(socket_.get(), generic, length), 0);
    // After bind: before it, the kernel may choose a port that someone else reserved in this same way.
    const int yes = 1;
    EXPECT_EQ(::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes), 0);
    EXPECT_EQ(::getsockname(socket_.get(), generic, &length), 0);
    number_ = ntohs(address.sin_port);
  }
  int number() const { return number_; }

 private:
  base::Fd socket_;
  int number_ = 0;
};

}  // namespace lamina::test
