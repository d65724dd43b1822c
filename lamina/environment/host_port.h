// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lamina/environment/address.h"

namespace lamina::environment {

// An address as an option names it: HOST:PORT, or [HOST]:PORT.
struct HostPort {
  std::string host;
  int port = 0;

  // None where the text is no such address.
  static std::optional<HostPort> read(const std::string& text);
  std::string text() const;
  // Throws base::ConfigError, which names the option, where the host has none.
  std::vector<Address> addresses(const std::string& option) const;
};

}  // namespace lamina::environment
