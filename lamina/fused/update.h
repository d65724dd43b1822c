// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "lamina/fused/rule.h"
#include "lamina/fused/threads.h"
#include "lamina/layout/dtype.h"

namespace lamina::fused {

// A parameter, or some of its elements, in memory. Floats of 32, 64 or 16 bits; what has 16 is computed in 32.
struct Part {
  std::size_t count = 0;
  layout::DType dtype{};           // of the parameter and of its states
  layout::DType gradient_dtype{};  // any
  layout::DType copy_dtype{};      // any
  void* parameter = nullptr;
  const void* gradient = nullptr;
  void* copy = nullptr;                     // gets the new values too, rounded; may be null
  std::array<void*, kMostStates> states{};  // those that lie like the parameter
  bool first = false;                       // this is the first update with these states
  Numbers numbers{};                        // the states that are numbers; `update` advances them
  Norms norms{};                            // of all of the parameter: from `measure`, combined over its holders
};

// How a step is done.
struct Call {
  const Rule& rule;
  Hyper hyper;                // checked: see check
  double gradient_scale = 1;  // gradients are multiplied by it first
  double gradient_norm = 0;   // of all gradients of the step so scaled, where the declaration asks for it
  bool double_numbers = true;

  Moment moment(bool first) const { return {rule.context, first, gradient_norm, double_numbers}; }
};

// The threads and loops that do it. Results are the same bits whatever stands here.
struct Workers {
  Threads& threads;
  std::size_t chunk = 16 * kBlock;  // elements that a thread takes at once
  Vectors vectors = widest_vectors();
};

// Throws UsageError for hyper-parameters that the rule does not take.
void check(const Rule& rule, Hyper hyper);

// The first of two passes, see [Note: needs]: sets the norms of each part, of its own elements. Squares are summed.
void measure(const Call& call, std::span<Part> parts, const Workers& workers);

// Updates parameters and states in place. Parts may be updated from several threads at once, each by one of them.
void update(const Call& call, std::span<Part> parts, const Workers& workers);

}  // namespace lamina::fused
