// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "lamina/model/parameter_table.h"

namespace lamina::sharding {

// The memory of a rank for parameters and their gradients, in bytes. States of the optimizer and activations come on
// top.
struct MemoryNeed {
  std::int64_t whole = 0;      // of parameters that it has all of, and of buffers
  std::int64_t sharded = 0;    // of those that are shared out
  std::int64_t trained = 0;    // of the whole ones, those with gradients
  std::int64_t there = 0;      // that values take already, which go or stay
  std::int64_t available = 0;  // beside those

  // Bytes that a rank takes where groups of `degree` ranks share the sharded parameters out.
  std::int64_t bytes(int degree) const { return whole + trained + 2 * layout::share_of(sharded, degree, 0).size; }
  bool fits(int degree) const { return bytes(degree) <= there + available; }
};

// Gives this rank's need, where `available` bytes of its memory are free.
MemoryNeed need_of(const model::ParameterTable& table, std::int64_t available);

// The smallest divisor of `replicas` with which all ranks fit; none where none does.
std::optional<int> smallest_degree(std::span<const MemoryNeed> ranks, int replicas);

}  // namespace lamina::sharding
