// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>

#include <optional>
#include <string>
#include <vector>

#include "lamina/base/fd.h"

namespace lamina::environment {

// A numeric internet address with a port. All sockets made from one are non-blocking and close on exec.
class Address {
 public:
  // Reads what text() wrote; throws base::FormatError.
  static Address parse(const std::string& text);
  // `host` may be numeric or a name. Throws base::ConfigError when it has no address.
  static std::vector<Address> resolve(const std::string& host, int port);
  // The address of this machine from which `host` is reached, with port 0; 127.0.0.1 or ::1 for a loopback
  // host. Throws base::ConfigError when `host` cannot be resolved or reached.
  static Address local_towards(const std::string& host, int port);

  // An address of this machine, with port 0, at which others may find it. It is that of the default route, else the
  // first of an interface that is up; none where the machine has the loopback device alone.
  static std::optional<Address> outward();

  std::string text() const;  // "10.0.0.7 4711"
  std::string host() const;  // "10.0.0.7"
  bool loopback() const;
  std::string interface() const;  // the network interface of this machine that has it, "eth0"; "" where none has
  bool ipv4() const { return storage_.ss_family == AF_INET; }

  // A socket that listens on this address; with port 0 the system picks one, which bound_to() tells.
  base::Fd listen() const;
  static Address bound_to(const base::Fd& socket);
  // A socket on its way to this address: writable once connected, or once that failed.
  base::Fd begin_connect() const;

 private:
  template <class Take>
  static void each_own(const Take& take);  // of this machine's, with its row of getifaddrs()
  base::Fd open() const;
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage_); }

  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

}  // namespace lamina::environment
