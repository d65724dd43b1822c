// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/contact/secret.h"

namespace lamina::rendezvous {

// The greeting of each rank to all others when it joins. They read it in a store that strangers may write to, so where
// the launcher gave a secret it is signed, for one rank and one join.
struct Hello {
  std::string lamina;  // version
  std::string torch;   // version
  std::string wire;    // version of the format of messages
  std::string configuration;
  std::string liveness_address;
  std::string place;      // [Note: place]
  std::string secret;     // rank 0's, where no launcher gave one
  std::string signature;  // empty where no launcher gave a secret

  static Hello of_this_version();  // of lamina and of torch

  // `join` names the meeting in which it is said.
  void sign(const contact::Secret& secret, std::string_view join, base::Rank rank);
  bool signed_by(const contact::Secret& secret, std::string_view join, base::Rank rank) const;

  std::string encode() const;
  // Throws base::FormatError. Of another version of lamina only that is read: it comes first in every version.
  static Hello decode(const std::string& bytes);

 private:
  contact::Mac proof(const contact::Secret& secret, std::string_view join, base::Rank rank) const;
};

// Throws base::ConfigError that names two ranks and their difference, the same on every rank, when the ranks cannot
// work together; of configurations, every key that differs and both its values.
void check_compatible(const std::vector<Hello>& hellos);

}  // namespace lamina::rendezvous
