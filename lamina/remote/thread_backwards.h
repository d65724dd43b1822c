// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lamina::remote {

// Counts the backwards into other ranks' modules, of those that accumulate gradients, that this thread has asked for;
// whoever has run some of them for a reason of its own sets it back.
std::int64_t& thread_backwards();

}  // namespace lamina::remote
