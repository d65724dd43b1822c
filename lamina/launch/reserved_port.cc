// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/reserved_port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>

#include "lamina/base/system_error.h"
#include "lamina/launch/error.h"

namespace lamina::launch {
namespace {

sockaddr_in loopback() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// 0, or the errno.
int bind_reusing(const sockaddr_in& address) {
  const base::Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  return ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ? 0 : errno;
}

}  // namespace

ReservedPort::ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address = loopback();
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;
  const int yes = 1;
  // SO_REUSEADDR after bind: before it, the kernel may choose a port that someone else reserved in this same way.
  if (!socket_ || ::bind(socket_.get(), generic, size) != 0 ||
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::getsockname(socket_.get(), generic, &size) != 0) {
    throw StartError("no free TCP port on 127.0.0.1: " + base::system_error());
  }
  number_ = ntohs(address.sin_port);
}

bool is_taken(const std::string& address, int port) {
  sockaddr_in place = loopback();
  place.sin_port = htons(static_cast<std::uint16_t>(port));
  in_addr numeric{};
  if (::inet_pton(AF_INET, address.c_str(), &numeric) == 1) {
    sockaddr_in there = place;
    there.sin_addr = numeric;
    const int failed = bind_reusing(there);
    if (failed != EADDRNOTAVAIL) return failed == EADDRINUSE;
  }
  return bind_reusing(place) == EADDRINUSE;
}

}  // namespace lamina::launch
