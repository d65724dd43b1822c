// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/host_port.h"

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/whole_number.h"

namespace lamina::environment {

std::optional<HostPort> HostPort::read(const std::string& text) {
  constexpr int kGreatest = 65535;
  const auto colon = text.rfind(':');
  auto host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  const auto port = colon == std::string::npos ? std::nullopt : base::whole_number(text.substr(colon + 1));
  if (host.empty() || !port || *port < 1 || *port > kGreatest) return std::nullopt;
  return HostPort{host, *port};
}

std::string HostPort::text() const {
  return host.find(':') == std::string::npos ? base::str(host, ":", port) : base::str("[", host, "]:", port);
}

std::vector<Address> HostPort::addresses(const std::string& option) const {
  try {
    return Address::resolve(host, port);
  } catch (const base::ConfigError&) {
    throw base::ConfigError(base::str(option, " ", text(), ": no machine of the name ", host, " is known here"));
  }
}

}  // namespace lamina::environment
