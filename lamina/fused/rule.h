// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lamina/fused/declaration.h"
#include "lamina/fused/value.h"
#include "lamina/fused/vectors.h"

namespace lamina::fused {

inline constexpr std::size_t kMostStates = 4;  // that lie like the parameter
inline constexpr std::size_t kMostNumbers = 4;
inline constexpr std::size_t kMostNorms = 2;

using Numbers = std::array<double, kMostNumbers>;
using Norms = std::array<double, kMostNorms>;
using Coefficients = std::array<double, 16>;

// Consecutive elements of a parameter, with those of its gradient and of its states.
template <class T>
struct Chunk {
  std::size_t count = 0;
  T* parameter = nullptr;
  const T* gradient = nullptr;
  T gradient_scale = 1;                  // gradients are multiplied by it first
  std::array<T*, kMostStates> states{};  // those that are used, in the order of the declaration
  Vectors vectors = Vectors::kBaseline;
  const void* context = nullptr;  // the rule's
};

// Parameters that are updated together, with their gradients and states, as arrays.
struct Operands {
  Value parameter, gradient;
  std::array<Value, kMostStates> states;  // as Chunk's
};

// The loops of a rule over memory, for one choice of its flags.
struct Kernel {
  std::uint32_t states = 0;  // a bit for each that lies like the parameter and is used
  void (*update_float)(const Coefficients&, const Chunk<float>&) = nullptr;
  void (*update_double)(const Coefficients&, const Chunk<double>&) = nullptr;
  // Writes what this chunk, of kBlock elements at most, adds to each norm. May write states, never the parameter. Null
  // where the rule needs elements alone.
  void (*measure_float)(const Coefficients&, const Chunk<float>&, double* norms) = nullptr;
  void (*measure_double)(const Coefficients&, const Chunk<double>&, double* norms) = nullptr;
  // Does it with arrays; see [Note: values]. Null where a shared library has loops alone.
  void (*update_arrays)(std::span<const Value> coefficients, Operands&) = nullptr;
  // Elements of which the norms are; a number where a norm is not used.
  std::array<Value, kMostNorms> (*measure_arrays)(std::span<const Value> coefficients, Operands&) = nullptr;
};

inline constexpr std::size_t kBlock = 512;

// The moment at which a parameter is updated.
struct Moment {
  const void* context = nullptr;  // the rule's
  bool first = false;             // its states are new
  double gradient_norm = 0;       // of all gradients of the step, where the declaration asks for it
  bool double_numbers = true;     // torch's classes keep numbers in double precision rather than in float32
};

// An optimizer as functions of numbers and memory, all of them pure: a table, so that a shared library can give one.
struct Rule {
  Declaration declaration;
  const void* context = nullptr;  // handed to the functions; the library's table
  // Checks between hyper-parameters: words for an error, or null. May be null itself.
  const char* (*check)(Hyper, const void* context) = nullptr;
  Kernel (*kernel)(Hyper) = nullptr;
  // Once for a parameter in each pass: advances its numbers, and says what is the same for all of its elements.
  Coefficients (*prepare)(Hyper, const Moment&, Numbers&) = nullptr;
  // Between the passes: takes the norms of all of the parameter. Null where the rule needs elements alone.
  void (*finish)(Hyper, const Norms&, const Moment&, Numbers&, Coefficients&) = nullptr;
};

}  // namespace lamina::fused
