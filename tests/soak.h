// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>

namespace lamina::test {

// How many rounds a test makes: many in a soak, else few.
template <typename Number>
Number in_a_soak(Number many, Number few) {
  return std::getenv("LAMINA_SOAK") != nullptr ? many : few;
}

}  // namespace lamina::test
