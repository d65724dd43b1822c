// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/environment/address.h"

namespace lamina::launch {

// An address as an option names it: HOST:PORT, or [HOST]:PORT.
struct HostPort {
  std::string host;
  int port = 0;

  // Throws CLI::ValidationError.
  static HostPort read(const std::string& option, const std::string& text);
  std::string text() const;
  // Throws base::ConfigError, which names the option, where the host has none.
  std::vector<environment::Address> addresses(const std::string& option) const;
};

}  // namespace lamina::launch
