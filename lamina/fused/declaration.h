// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lamina::fused {

// [Note: needs] An optimizer that needs of a parameter its elements alone updates any part of it by itself. One that
// needs norms takes two passes: each holder measures its part, the results are combined over the holders, every element
// counted once, and each updates its part. One that needs the whole is called where the whole is.
enum class Needs : std::uint8_t { kElements, kNorms, kWhole };

// The operation that combines a value measured of two parts.
enum class Combine : std::uint8_t { kSum, kMax };
inline double combined(Combine how, double a, double b) {
  if (how == Combine::kSum) return a + b;
  return b > a || std::isnan(b) ? b : a;
}

enum class StateKind : std::uint8_t {
  kLikeParameter,  // an element for each of the parameter's
  kNumber,         // one number
  kTorchsNumber,   // one that torch's classes keep in its default type, as a count of steps
  kOwnShape,
};
inline bool is_number(StateKind kind) { return kind == StateKind::kNumber || kind == StateKind::kTorchsNumber; }

struct StateField {
  const char* name;  // as torch's state dicts have it
  StateKind kind = StateKind::kLikeParameter;
  const char* initial = "";  // the hyper-parameter whose value it begins with, all over; "" for zero
};

// Values that a hyper-parameter may have.
enum class Bound : std::uint8_t {
  kAny,
  kNotNegative,
  kFraction,  // 0 <= x < 1
  kUpToOne,   // 0 <= x <= 1
  kBetween,   // 0 < x < 1
  kAboveOne,  // 1 < x
  kFlag,
  kChoice,
};

// A hyper-parameter without a preset has to be given.
inline constexpr double kRequired = std::numeric_limits<double>::quiet_NaN();

struct HyperField {
  const char* name;
  double preset = 0;
  Bound bound = Bound::kAny;
  const char* label = "";    // in errors, as torch's say it: "learning rate" in "Invalid learning rate: -1"
  const char* choices = "";  // of kChoice, which is the index of a word: "grad direct"
  const char* tuple = "";    // the option of torch's that has it: "betas" has beta1 and beta2, in their order
};

// The properties of an optimizer that are known before it is used.
struct Declaration {
  const char* name;
  Needs needs = Needs::kElements;
  std::span<const HyperField> hyper;
  std::span<const StateField> states;
  std::span<const Combine> norms = {};  // one for each value that is measured
  bool gradient_norm = false;           // of all gradients of a step, which `max_grad_norm` bounds
};

// The hyper-parameters of a step, in the order of the declaration; flags are 0 or 1.
using Hyper = std::span<const double>;

// A value as programs write it: a number, a flag or a word.
struct HyperValue {
  HyperValue(double value) : number(value) {}
  HyperValue(const char* value) : word(value) {}

  double number = 0;
  std::string_view word;
};

// The number of a value; throws UsageError for a word that is no choice.
double hyper_value(const HyperField& field, const HyperValue& value);

// The word that a number of kChoice stands for.
std::string hyper_word(const HyperField& field, double value);

// The values given by name, the presets for all others. Throws UsageError for a name that is not declared, for a word
// that is no choice, and for a required one that is not given; check_hyper tests the numbers.
std::vector<double> hyper_values(const Declaration& declaration,
                                 std::span<const std::pair<std::string_view, HyperValue>> given);

// Throws UsageError, in torch's words, for the first that is out of its bounds.
void check_hyper(const Declaration& declaration, Hyper hyper);

// The index of a hyper-parameter; the number of all if it is not declared.
std::size_t hyper_index(const Declaration& declaration, std::string_view name);

}  // namespace lamina::fused
