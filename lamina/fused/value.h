// SPDX-License-Identifier: Apache-2.0
// [Note: values] A rule says what happens to one element, as a template over the type that it computes with. With a
// floating-point type it becomes a loop over memory; with Value it becomes operations on whole arrays, which may lie on
// any device: nothing here asks for an element.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lamina/base/error.h"

namespace lamina::fused {

class Value;

// Arrays, one for each of the parameters that are updated together. Who has them implements the operations.
class Arrays {
 public:
  enum class Unary : std::uint8_t { kSqrt, kAbs };
  enum class Binary : std::uint8_t { kAdd, kSubtract, kMultiply, kDivide, kAtLeast, kAtMost };

  virtual ~Arrays() = default;
  // With `in_place` these arrays get the result, else new ones do. NaN stays NaN.
  virtual Value unary(Unary operation, bool in_place) = 0;
  virtual Value binary(Binary operation, const Value& other, bool in_place) = 0;
  // For each element one of three values by its sign, that of zero for NaN.
  virtual Value by_sign(const Value& negative, const Value& zero, const Value& positive) = 0;
};

// Operands of a rule: arrays, or numbers, which are the same for all elements of an array.
class Value {
 public:
  Value(double number = 0) : numbers_{number} {}
  // One for each of the arrays, all of them zero or none.
  explicit Value(std::vector<double> numbers) : numbers_(std::move(numbers)) {}
  explicit Value(std::shared_ptr<Arrays> arrays) : arrays_(std::move(arrays)) {}

  const std::shared_ptr<Arrays>& arrays() const { return arrays_; }  // null for numbers
  std::span<const double> numbers() const { return numbers_; }       // a single one holds for all arrays

  Value& operator+=(Value other) { return become(Arrays::Binary::kAdd, other); }
  Value& operator-=(Value other) { return become(Arrays::Binary::kSubtract, other); }
  Value& operator*=(Value other) { return become(Arrays::Binary::kMultiply, other); }

  friend Value operator+(Value a, Value b) { return commuted(Arrays::Binary::kAdd, a, b); }
  friend Value operator-(Value a, Value b) { return std::move(a.become(Arrays::Binary::kSubtract, b)); }
  friend Value operator*(Value a, Value b) { return commuted(Arrays::Binary::kMultiply, a, b); }
  friend Value operator/(Value a, Value b) { return std::move(a.become(Arrays::Binary::kDivide, b)); }
  friend Value larger(Value a, Value b) { return commuted(Arrays::Binary::kAtLeast, a, b); }
  friend Value bounded(Value a, Value least, Value most) {
    a.become(Arrays::Binary::kAtLeast, least);
    return std::move(a.become(Arrays::Binary::kAtMost, most));
  }
  friend Value sqrt(Value a) { return a.known().unary(Arrays::Unary::kSqrt, a.is_alone()); }
  friend Value abs(Value a) { return a.known().unary(Arrays::Unary::kAbs, a.is_alone()); }
  friend Value by_sign(const Value& decides, const Value& negative, const Value& zero, const Value& positive) {
    return decides.known().by_sign(negative, zero, positive);
  }

  // Compares numbers, which are alike in this.
  friend bool operator==(const Value& a, double number) {
    base::internal_check(!a.arrays_, "a rule compares elements of arrays");
    return a.numbers_.front() == number;
  }

 private:
  // Nobody else looks at the arrays, so that they may get a result.
  bool is_alone() const { return arrays_.use_count() == 1; }

  Arrays& known() const {
    base::internal_check(arrays_ != nullptr, "a rule computes with numbers alone");
    return *arrays_;
  }

  Value& become(Arrays::Binary operation, const Value& other) {
    const bool one = other.numbers_.size() == 1 && other.numbers_.front() == 1;
    const bool scales = operation == Arrays::Binary::kMultiply || operation == Arrays::Binary::kDivide;
    if (!(one && scales)) *this = known().binary(operation, other, is_alone());
    return *this;
  }

  // Begins with the operand whose memory may get the result.
  static Value commuted(Arrays::Binary operation, Value& a, Value& b) {
    const bool swaps = !a.arrays_ || (!a.is_alone() && b.arrays_ && b.is_alone());
    return std::move(swaps ? b.become(operation, a) : a.become(operation, b));
  }

  std::shared_ptr<Arrays> arrays_;
  std::vector<double> numbers_;
};

}  // namespace lamina::fused
