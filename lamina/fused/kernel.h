// SPDX-License-Identifier: Apache-2.0
// Loops over memory, and operations on arrays ([Note: values]), for rules that say what happens to one element.
// [Note: steps] A rule is a struct with a member template `Step` over the type of its coefficients, which are all its
// members; with a constant `kStates`, and
//
//   void operator()(T& parameter, T gradient, std::array<T, kStates>& states) const;
//   std::array<T, n> measured(T parameter, T gradient, std::array<T, kStates>& states) const;   // if it needs norms
//
// One that takes the states as const leaves them as they are, and they are not written.
//
// Results depend on no chunk, thread or width of vectors: elements know nothing of each other, and norms are summed in
// double over fixed blocks and lanes.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "lamina/fused/rule.h"

namespace lamina::fused {

// Functions of elements; those of a Value are found beside it.
using std::abs;
using std::sqrt;

// The larger one; NaN, if there is one.
template <class T>
T larger(T a, T b) {
  return b > a || b != b ? b : a;
}

template <class Of>
using Exact = typename Of::template Step<double>;

template <class Of>
Coefficients coefficients(const Exact<Of>& step) {
  static_assert(sizeof(step) <= sizeof(Coefficients) && std::is_trivially_copyable_v<Exact<Of>>);
  Coefficients all{};
  std::memcpy(all.data(), &step, sizeof(step));
  return all;
}

template <class Of, class T>
auto step_of(const Coefficients& coefficients) {
  using Step = typename Of::template Step<T>;
  std::array<T, sizeof(Step) / sizeof(T)> values;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<T>(coefficients[i]);
  return std::bit_cast<Step>(values);
}

template <class Of>
auto step_of(std::span<const Value> coefficients) {
  return [&]<std::size_t... I>(std::index_sequence<I...>) {
    return typename Of::template Step<Value>{coefficients[I]...};
  }(std::make_index_sequence<sizeof(Exact<Of>) / sizeof(double)>());
}

// The hyper-parameters of a rule as a struct of doubles in their order.
template <class Values>
Values read(Hyper hyper) {
  static_assert(sizeof(Values) % sizeof(double) == 0 && std::is_trivially_copyable_v<Values>);
  Values values;
  std::memcpy(&values, hyper.data(), sizeof(values));
  return values;
}

// Calls `work` with each of these elements and its states, which are written unless it takes them as const.
template <std::size_t States, bool Writes, class T, class Work>
[[gnu::always_inline]] inline void for_each_element(const Chunk<T>& chunk, std::size_t begin, std::size_t end,
                                                    const Work& work) {
  T* const parameters = chunk.parameter;
  const T* const gradients = chunk.gradient;
  const T scale = chunk.gradient_scale;
  const std::array<T*, kMostStates> memory = chunk.states;
#pragma GCC ivdep
  for (std::size_t i = begin; i < end; ++i) {
    std::array<T, States> states;
    for (std::size_t k = 0; k < States; ++k) states[k] = memory[k][i];
    work(i, parameters, gradients[i] * scale, states);
    for (std::size_t k = 0; Writes && k < States; ++k) memory[k][i] = states[k];
  }
}

template <class Of, class T>
void update_chunk(const Coefficients& coefficients, const Chunk<T>& chunk) {
  with_vectors(chunk.vectors, [&] {
    using Step = typename Of::template Step<T>;
    constexpr bool kWrites = !std::is_invocable_v<const Step&, T&, T, const std::array<T, Step::kStates>&>;
    const Step step = step_of<Of, T>(coefficients);
    const auto update = [&](std::size_t i, T* parameters, T gradient, auto& states) {
      T parameter = parameters[i];
      step(parameter, gradient, states);
      parameters[i] = parameter;
    };
    for_each_element<Step::kStates, kWrites>(chunk, 0, chunk.count, update);
  });
}

template <std::size_t States>
std::array<Value, States> states_of(Operands& operands) {
  std::array<Value, States> states;
  std::move(operands.states.begin(), operands.states.begin() + States, states.begin());
  return states;
}

template <class Of>
void update_arrays(std::span<const Value> coefficients, Operands& operands) {
  using Step = typename Of::template Step<Value>;
  auto states = states_of<Step::kStates>(operands);
  step_of<Of>(coefficients)(operands.parameter, operands.gradient, states);
  std::ranges::move(states, operands.states.begin());
}

inline constexpr std::size_t kLanes = 32;

// The sum of squares, or the largest absolute value, of elements in turn: each lane has those of a vector's place.
template <Combine How, class T>
struct Lanes {
  using Lane = std::conditional_t<How == Combine::kSum, double, T>;
  std::array<Lane, kLanes> lanes{};

  [[gnu::always_inline]] void add(std::size_t lane, Lane value) {
    lanes[lane] = How == Combine::kSum ? lanes[lane] + value * value : larger(lanes[lane], std::abs(value));
  }

  [[gnu::always_inline]] double all() {
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) {
        const Lane other = lanes[i + half];
        lanes[i] = How == Combine::kSum ? lanes[i] + other : larger(lanes[i], other);
      }
    }
    return lanes[0];
  }
};

// Measures the norms from First on.
template <class Of, std::size_t First, Combine... Combines>
struct Measure {
  template <class T>
  static void chunk(const Coefficients& coefficients, const Chunk<T>& chunk, double* norms) {
    with_vectors(chunk.vectors, [&] {
      using Step = typename Of::template Step<T>;
      constexpr bool kWrites =
          !requires(const Step& step, const std::array<T, Step::kStates>& states) { step.measured(T(), T(), states); };
      const Step step = step_of<Of, T>(coefficients);
      std::tuple<Lanes<Combines, T>...> measured;
      std::size_t begin = 0;
      const auto measure = [&](std::size_t i, T* parameters, T gradient, auto& states) {
        const auto values = step.measured(parameters[i], gradient, states);
        std::apply([&, k = std::size_t{0}](auto&... lanes) mutable { (lanes.add(i - begin, values[k++]), ...); },
                   measured);
      };
      for (; begin + kLanes <= chunk.count; begin += kLanes) {
        for_each_element<Step::kStates, kWrites>(chunk, begin, begin + kLanes, measure);
      }
      for_each_element<Step::kStates, kWrites>(chunk, begin, chunk.count, measure);
      std::apply([&, k = First](auto&... lanes) mutable { ((norms[k++] = lanes.all()), ...); }, measured);
    });
  }

  static std::array<Value, kMostNorms> arrays(std::span<const Value> coefficients, Operands& operands) {
    using Step = typename Of::template Step<Value>;
    auto states = states_of<Step::kStates>(operands);
    auto measured = step_of<Of>(coefficients).measured(operands.parameter, operands.gradient, states);
    std::ranges::move(states, operands.states.begin());
    std::array<Value, kMostNorms> norms;
    std::ranges::move(measured, norms.begin() + First);
    return norms;
  }
};

// The loops of a rule that needs elements alone.
template <class Of>
Kernel elements_kernel(std::uint32_t states) {
  return {.states = states,
          .update_float = &update_chunk<Of, float>,
          .update_double = &update_chunk<Of, double>,
          .update_arrays = &update_arrays<Of>};
}

// The loops of a rule that needs norms: of those declared, from First on, the ones that are combined so.
template <class Of, std::size_t First, Combine... Combines>
Kernel norms_kernel(std::uint32_t states) {
  using Measured = Measure<Of, First, Combines...>;
  return {.states = states,
          .update_float = &update_chunk<Of, float>,
          .update_double = &update_chunk<Of, double>,
          .measure_float = &Measured::template chunk<float>,
          .measure_double = &Measured::template chunk<double>,
          .update_arrays = &update_arrays<Of>,
          .measure_arrays = &Measured::arrays};
}

}  // namespace lamina::fused
