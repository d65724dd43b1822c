// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/tensor_lists.h"

#include <ATen/ops/_foreach_abs.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/where.h>

#include <memory>

namespace lamina::optim {
namespace {

using fused::Arrays;
using fused::Value;

// `other` is a number, numbers, or tensors.
template <class Other>
std::vector<at::Tensor> made(Arrays::Binary operation, const std::vector<at::Tensor>& tensors, const Other& other) {
  switch (operation) {
    case Arrays::Binary::kAdd:
      return at::_foreach_add(tensors, other);
    case Arrays::Binary::kSubtract:
      return at::_foreach_sub(tensors, other);
    case Arrays::Binary::kMultiply:
      return at::_foreach_mul(tensors, other);
    case Arrays::Binary::kDivide:
      return at::_foreach_div(tensors, other);
    case Arrays::Binary::kAtLeast:
      return at::_foreach_clamp_min(tensors, other);
    case Arrays::Binary::kAtMost:
      return at::_foreach_clamp_max(tensors, other);
  }
  throw base::InternalError("an operation on tensors that there is not");
}

template <class Other>
void change(Arrays::Binary operation, const std::vector<at::Tensor>& tensors, const Other& other) {
  switch (operation) {
    case Arrays::Binary::kAdd:
      return at::_foreach_add_(tensors, other);
    case Arrays::Binary::kSubtract:
      return at::_foreach_sub_(tensors, other);
    case Arrays::Binary::kMultiply:
      return at::_foreach_mul_(tensors, other);
    case Arrays::Binary::kDivide:
      return at::_foreach_div_(tensors, other);
    case Arrays::Binary::kAtLeast:
      return at::_foreach_clamp_min_(tensors, other);
    case Arrays::Binary::kAtMost:
      return at::_foreach_clamp_max_(tensors, other);
  }
}

// Calls `work` with what torch's operations on lists take in the place of a value.
template <class Work>
void with_operand(const Value& value, const Work& work) {
  if (value.arrays()) return work(at::TensorList(tensors_of(value)));
  const auto numbers = value.numbers();
  if (numbers.size() == 1) return work(at::Scalar(numbers.front()));
  const std::vector<at::Scalar> scalars(numbers.begin(), numbers.end());
  work(at::ArrayRef<at::Scalar>(scalars));
}

// The value for tensor `i` of a list.
at::Tensor at_place(const Value& value, std::size_t i, const at::Tensor& like) {
  if (value.arrays()) return tensors_of(value)[i];
  const auto numbers = value.numbers();
  return at::full({}, numbers.size() == 1 ? numbers.front() : numbers[i], like.options());
}

}  // namespace

Value value_of(std::vector<at::Tensor> tensors) { return Value(std::make_shared<TensorList>(std::move(tensors))); }

const std::vector<at::Tensor>& tensors_of(const Value& value) {
  return static_cast<const TensorList&>(*value.arrays()).tensors();
}

Value TensorList::unary(Unary operation, bool in_place) {
  if (!in_place) return value_of(operation == Unary::kSqrt ? at::_foreach_sqrt(tensors_) : at::_foreach_abs(tensors_));
  if (operation == Unary::kSqrt) {
    at::_foreach_sqrt_(tensors_);
  } else {
    at::_foreach_abs_(tensors_);
  }
  return value_of(tensors_);
}

Value TensorList::binary(Binary operation, const Value& other, bool in_place) {
  Value result;
  with_operand(other, [&](const auto& operand) {
    if (in_place) {
      change(operation, tensors_, operand);
      result = value_of(tensors_);
    } else {
      result = value_of(made(operation, tensors_, operand));
    }
  });
  return result;
}

Value TensorList::by_sign(const Value& negative, const Value& zero, const Value& positive) {
  std::vector<at::Tensor> chosen;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& decides = tensors_[i];
    const auto not_positive = at::where(at::lt(decides, 0), at_place(negative, i, decides), at_place(zero, i, decides));
    chosen.push_back(at::where(at::gt(decides, 0), at_place(positive, i, decides), not_positive));
  }
  return value_of(std::move(chosen));
}

}  // namespace lamina::optim
