// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>

#include "lamina/environment/rank_contract.h"

// [Note: job secret] 32 bytes that all processes of a job share and no other process knows. The launcher passes them
// through an inherited file descriptor. Under a launcher that passes none (torchrun), rank 0 makes them and the others
// read them from the job's store. Anyone who reaches its port can read them as well.
//
// Everything that ranks believe of each other is proven by it. Their words in the store (Hello) are signed, and a
// connection begins with a challenge in both directions ([Note: handshake]). The secret and that challenge give the
// keys of the connection, by which each piece of a message is signed ([Note: pieces]).
namespace lamina::contact {

using Secret = std::array<std::uint8_t, environment::kSecretBytes>;
using Mac = std::array<std::uint8_t, 32>;

using Digest = std::array<std::uint8_t, 32>;

// The secret behind the descriptor named in LAMINA_SECRET_FD (a pipe, or a file that is read from its beginning), which
// is closed and the variable removed. Kept for the life of the process: later calls return the same. None when the
// variable is not set. Throws base::ConfigError when the descriptor does not give 32 bytes.
std::optional<Secret> inherited_secret();

// From the system's random numbers.
Secret random_secret();

// HMAC-SHA256 of the fields, each with its length. `purpose` keeps what is made for one use apart from all others.
Mac authenticate(const Secret& secret, std::string_view purpose, std::initializer_list<std::string_view> fields);

// In a time that does not depend on the values.
bool same(const Mac& a, const Mac& b);

// SHA-256.
Digest digest(std::string_view bytes);

// The key of one direction of one connection, ready for many short texts: the first block of both hashes of an
// HMAC, which is the same for all of them, is hashed once.
class Signer {
 public:
  explicit Signer(const Secret& key);
  Mac sign(std::string_view text) const;

 private:
  struct FirstBlocks;
  std::shared_ptr<const FirstBlocks> hashed_;
};

}  // namespace lamina::contact
