// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace lamina::transport {

// What each rank tells all others when it joins.
struct Hello {
  std::string lamina;  // version
  std::string torch;   // version
  std::string wire;    // version of the format of messages
  std::string configuration;
  std::string liveness_address;
  std::string wire_address;

  static Hello of_this_version();

  std::string encode() const;
  // Throws base::FormatError. Of another version of lamina only that is read: it comes first in every version.
  static Hello decode(const std::string& bytes);
};

// Throws base::ConfigError that names two ranks and their difference, the same on every rank, when the ranks cannot
// work together; of configurations, every key that differs and both its values.
void check_compatible(const std::vector<Hello>& hellos);

}  // namespace lamina::transport
