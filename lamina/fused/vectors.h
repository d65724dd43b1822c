// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace lamina::fused {

// The widest vectors that loops over elements are made of. Results are the same bits with each.
enum class Vectors : std::uint8_t { kBaseline, kAvx2, kAvx512 };

// Says which of them this processor has.
Vectors widest_vectors();

#if defined(__x86_64__)
template <class Work>
[[gnu::target("arch=x86-64-v4"), gnu::flatten]] void with_avx512(const Work& work) {
  work();
}

template <class Work>
[[gnu::target("arch=x86-64-v3"), gnu::flatten]] void with_avx2(const Work& work) {
  work();
}
#endif

// Calls `work`. Its loops, and those of functions that are inlined into it, are compiled once for each kind of vectors.
template <class Work>
void with_vectors(Vectors vectors, const Work& work) {
#if defined(__x86_64__)
  if (vectors == Vectors::kAvx512) return with_avx512(work);
  if (vectors == Vectors::kAvx2) return with_avx2(work);
#endif
  work();
}

}  // namespace lamina::fused
