// SPDX-License-Identifier: Apache-2.0
#include "lamina/base/hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace lamina::base {

std::uint64_t hash64(std::string_view bytes, std::uint64_t seed) { return XXH64(bytes.data(), bytes.size(), seed); }

}  // namespace lamina::base
