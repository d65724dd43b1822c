// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/reserved_port.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>

#include "lamina/base/system_error.h"
#include "lamina/launch/ranks/error.h"

namespace lamina::launch {
namespace {

constexpr const char* kLoopback = "127.0.0.1";
constexpr const char* kLoopback6 = "::1";

// A numeric address of either family; IPv4's loopback one where `text` is none.
class Endpoint {
 public:
  explicit Endpoint(const std::string& text, int port = 0) {
    if (::inet_pton(AF_INET6, text.c_str(), &six_.sin6_addr) == 1) {
      six_.sin6_family = AF_INET6;
      six_.sin6_port = htons(static_cast<std::uint16_t>(port));
      return;
    }
    four_.sin_family = AF_INET;
    four_.sin_port = htons(static_cast<std::uint16_t>(port));
    numeric_ = ::inet_pton(AF_INET, text.c_str(), &four_.sin_addr) == 1;
    if (!numeric_) four_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  }

  bool numeric() const { return numeric_; }
  base::Fd open() const { return base::Fd(::socket(generic_.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0)); }
  int bind(const base::Fd& socket) const { return ::bind(socket.get(), &generic_, size()) == 0 ? 0 : errno; }
  int port_of(const base::Fd& socket) {  // 0 where that cannot be told
    socklen_t length = size();
    if (::getsockname(socket.get(), &generic_, &length) != 0) return 0;
    return ntohs(generic_.sa_family == AF_INET6 ? six_.sin6_port : four_.sin_port);
  }

 private:
  socklen_t size() const { return generic_.sa_family == AF_INET6 ? sizeof six_ : sizeof four_; }

  union {
    sockaddr generic_;
    sockaddr_in four_;
    sockaddr_in6 six_{};
  };
  bool numeric_ = true;
};

void allow_reuse(const base::Fd& socket) {
  const int yes = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
}

// 0, or the errno.
int bind_reusing(const Endpoint& place) {
  const base::Fd socket = place.open();
  allow_reuse(socket);
  return place.bind(socket);
}

}  // namespace

ReservedPort::ReservedPort(const std::string& master) : master_(master) {
  const bool six = master.find(':') != std::string::npos;
  const char* loopback = six || bind_reusing(Endpoint(kLoopback)) == EADDRNOTAVAIL ? kLoopback6 : kLoopback;
  if (master == kLoopback) master_ = loopback;
  Endpoint place(loopback);
  socket_ = place.open();
  // SO_REUSEADDR after bind: before it, the kernel may choose a port that someone else reserved in this same way.
  if (socket_ && place.bind(socket_) == 0) {
    allow_reuse(socket_);
    number_ = place.port_of(socket_);
  }
  if (number_ == 0) throw StartError("no free TCP port on 127.0.0.1 or ::1: " + base::system_error());
}

bool is_taken(const std::string& address, int port) {
  if (const Endpoint there(address, port); there.numeric()) {
    const int failed = bind_reusing(there);
    if (failed != EADDRNOTAVAIL) return failed == EADDRINUSE;
  }
  return bind_reusing(Endpoint(kLoopback, port)) == EADDRINUSE;
}

}  // namespace lamina::launch
