// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "lamina/base/fd.h"
#include "lamina/contact/secret.h"
#include "lamina/environment/rank_contract.h"

namespace lamina::launch {

// The job's secret: 32 random bytes by which its ranks know each other. It travels by inherited descriptor only,
// never by argument or environment, which other users of the machine can or may read.
class Secret {
 public:
  static constexpr std::size_t kBytes = environment::kSecretBytes;

  Secret();  // throws StartError if the system gives no random bytes

  // One that several launchers share: the first bytes of a file that nobody else may read. Throws ConfigError.
  explicit Secret(const std::string& path);
  ~Secret();

  // An anonymous file that holds the secret and nothing else, at offset 0, closed on exec, not writable any more.
  // One per rank, for they share the offset with nobody then.
  base::Fd copy() const;

  contact::Secret bytes() const;

 private:
  std::array<std::byte, kBytes> bytes_;
};

}  // namespace lamina::launch
