// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "lamina/base/ids.h"
#include "lamina/base/rank_contract.h"

// [Note: job secret] 32 bytes that all processes of a job share and no other process knows. The launcher passes them
// through an inherited file descriptor. Under a launcher that passes none (torchrun), rank 0 makes them and the others
// read them from the job's store, which anyone who reaches its port can read as well.
namespace lamina::transport {

using Secret = std::array<std::uint8_t, base::kSecretBytes>;
using Mac = std::array<std::uint8_t, 32>;

// The secret of one direction between two ranks: frames without it are dropped before anything of them is decoded.
using Token = std::array<std::uint8_t, 16>;

// The secret behind the descriptor named in LAMINA_SECRET_FD (a pipe, or a file that is read from its beginning), which
// is closed and the variable removed. Kept for the life of the process: later calls return the same. None when the
// variable is not set. Throws base::ConfigError when the descriptor does not give 32 bytes.
std::optional<Secret> inherited_secret();

// From the system's random numbers.
Secret random_secret();

// HMAC-SHA256.
Mac authenticate(const Secret& secret, std::string_view text);

// In a time that does not depend on the values.
bool same(const Mac& a, const Mac& b);
bool same(const Token& a, const Token& b);

// The token of the frames from one rank to another in one generation of the job.
Token pair_token(const Secret& secret, std::string_view generation, base::Rank from, base::Rank to);

}  // namespace lamina::transport
