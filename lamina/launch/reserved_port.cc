// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/reserved_port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "lamina/launch/error.h"

namespace lamina::launch {

ReservedPort::ReservedPort() : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  socklen_t size = sizeof address;
  const int yes = 1;
  // SO_REUSEADDR after bind: before it, the kernel may choose a port that someone else reserved in this same way.
  if (!socket_ || ::bind(socket_.get(), generic, size) != 0 ||
      ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::getsockname(socket_.get(), generic, &size) != 0) {
    throw StartError("no free TCP port on 127.0.0.1: " + system_words());
  }
  number_ = ntohs(address.sin_port);
}

}  // namespace lamina::launch
