// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/system_error.h"

namespace lamina::environment {
namespace {

using base::Fd;
using base::system_error;

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Empty when `host` has no address; `why` then says why.
AddressList look_up(const std::string& host, const std::string& port, int flags, std::string* why) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found)) *why = gai_strerror(error);
  return AddressList(found, &freeaddrinfo);
}

}  // namespace

Address Address::parse(const std::string& text) {
  const auto space = text.find(' ');
  std::string why = "no port";
  AddressList found(nullptr, &freeaddrinfo);
  if (space != std::string::npos) {
    found = look_up(text.substr(0, space), text.substr(space + 1), AI_NUMERICHOST | AI_NUMERICSERV, &why);
  }
  if (!found) throw base::FormatError(base::str("not an address: \"", text, "\" (", why, ")"));
  Address address;
  std::memcpy(&address.storage_, found->ai_addr, found->ai_addrlen);
  address.length_ = found->ai_addrlen;
  return address;
}

std::vector<Address> Address::resolve(const std::string& host, int port) {
  std::string why;
  const auto found = look_up(host, std::to_string(port), AI_NUMERICSERV, &why);
  if (!found)
    throw base::ConfigError(base::str("MASTER_ADDR is \"", host, "\", which has no address: ", why),
                            base::Code{"start-master-unreachable"});
  std::vector<Address> addresses;
  for (const addrinfo* at = found.get(); at != nullptr; at = at->ai_next) {
    Address& address = addresses.emplace_back();
    std::memcpy(&address.storage_, at->ai_addr, at->ai_addrlen);
    address.length_ = at->ai_addrlen;
  }
  return addresses;
}

Address Address::local_towards(const std::string& host, int port) {
  std::string why;
  for (const Address& remote : resolve(host, port)) {
    // Connecting a datagram socket sends nothing: the system only picks the route, and with it our address.
    const Fd probe(::socket(remote.storage_.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!probe || ::connect(probe.get(), remote.raw(), remote.length_) != 0) {
      why = system_error();
      continue;
    }
    Address local = bound_to(probe);
    if (local.loopback()) return parse(local.ipv4() ? "127.0.0.1 0" : "::1 0");
    if (local.storage_.ss_family == AF_INET) reinterpret_cast<sockaddr_in&>(local.storage_).sin_port = 0;
    if (local.storage_.ss_family == AF_INET6) reinterpret_cast<sockaddr_in6&>(local.storage_).sin6_port = 0;
    return local;
  }
  throw base::ConfigError(base::str("MASTER_ADDR is \"", host, "\", which cannot be reached from here: ", why),
                          base::Code{"start-master-unreachable"});
}

std::string Address::text() const {
  char host[NI_MAXHOST];
  char port[NI_MAXSERV];
  if (getnameinfo(raw(), length_, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "unknown 0";
  }
  return base::str(host, " ", port);
}

std::string Address::host() const {
  const std::string both = text();
  return both.substr(0, both.find(' '));
}

bool Address::loopback() const {
  if (storage_.ss_family == AF_INET) {
    return (ntohl(reinterpret_cast<const sockaddr_in&>(storage_).sin_addr.s_addr) >> 24) == 127;
  }
  return storage_.ss_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(storage_).sin6_addr);
}

template <class Take>
void Address::each_own(const Take& take) {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> list(all, &::freeifaddrs);
  for (const ifaddrs* at = all; at != nullptr; at = at->ifa_next) {
    const auto family = at->ifa_addr == nullptr ? AF_UNSPEC : at->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    Address address;
    address.length_ = static_cast<socklen_t>(family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    std::memcpy(&address.storage_, at->ifa_addr, address.length_);
    take(address, *at);
  }
}

std::string Address::interface() const {
  std::string name;
  each_own([&](const Address& address, const ifaddrs& its) {
    if (name.empty() && address.host() == host()) name = its.ifa_name;
  });
  return name;
}

std::optional<Address> Address::outward() {
  constexpr const char* kElsewhere = "192.0.2.1";  // of no machine: addresses for documentation
  std::optional<Address> first;
  try {
    if (const Address routed = local_towards(kElsewhere, 9); !routed.loopback()) return routed;
  } catch (const base::ConfigError&) {
    first.reset();  // there is no default route
  }
  each_own([&](const Address& address, const ifaddrs& its) {
    const bool reaches = (its.ifa_flags & IFF_UP) != 0 && !address.loopback() && address.ipv4();
    if (reaches && !first) first = address;
  });
  return first;
}

base::Fd Address::open() const {
  Fd socket(::socket(storage_.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw base::Error(base::str("cannot open a socket: ", system_error()));
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return socket;
}

base::Fd Address::listen() const {
  Fd socket = open();
  const int on = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(socket.get(), raw(), length_) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) {
    throw base::Error(base::str("cannot listen on ", text(), ": ", system_error()));
  }
  return socket;
}

Address Address::bound_to(const base::Fd& socket) {
  Address address;
  address.length_ = sizeof address.storage_;
  if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.storage_), &address.length_) != 0) {
    throw base::Error(base::str("cannot read the address of a socket: ", system_error()));
  }
  return address;
}

base::Fd Address::begin_connect() const {
  Fd socket = open();
  // A failure that shows at once shows again as an error of the socket, where the caller looks for the others.
  [[maybe_unused]] const int later = ::connect(socket.get(), raw(), length_);
  return socket;
}

}  // namespace lamina::environment
