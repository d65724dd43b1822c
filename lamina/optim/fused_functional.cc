// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/fused_functional.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <optional>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::optim {
namespace {

using base::UsageError;
using layout::DType;

// The type of the reals that a tensor holds; none for what no rule updates.
std::optional<DType> reals_in(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat:
      return DType::kFloat32;
    case at::kDouble:
    case at::kComplexDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      return {};
  }
}

DType reals_of(const at::Tensor& tensor) { return reals_in(tensor.scalar_type()).value(); }

// Refuses what belongs to a parameter and does not fit it.
void check_fits(const at::Tensor& tensor, const at::Tensor& parameter, const char* what, const char* optimizer) {
  if (tensor.layout() != at::kStrided) {
    throw UsageError(base::str(optimizer, " does not support sparse gradients, please consider SparseAdam instead"));
  }
  if (!tensor.device().is_cpu()) {
    throw UsageError(
        base::str("the fused ", optimizer, " updates parameters on the CPU; a ", what, " is on ", tensor.device()));
  }
  if (!reals_in(tensor.scalar_type())) {
    throw UsageError(base::str(optimizer, " updates floating-point and complex parameters; a ", what, " is of type ",
                               tensor.scalar_type()));
  }
  if (tensor.sizes() != parameter.sizes() || tensor.is_complex() != parameter.is_complex()) {
    throw UsageError(base::str(optimizer, ": a ", what, " of shape ", tensor.sizes(), " and type ",
                               tensor.scalar_type(), " for a parameter of shape ", parameter.sizes(), " and type ",
                               parameter.scalar_type()));
  }
}

// Refuses a parameter of which several elements are one in memory: they cannot all have their values.
void check_alone(const at::Tensor& parameter, const char* optimizer) {
  if (at::has_internal_overlap(parameter) != at::MemOverlap::Yes) return;
  throw UsageError(base::str(optimizer, ": unsupported operation: more than one element of a parameter of shape ",
                             parameter.sizes(), " refers to a single memory location; clone() it before"));
}

// The spans of a list of updates, with the copies that some of them need.
class Spans {
 public:
  enum class Pass { kMeasure, kUpdate };

  // Throws before anything is changed.
  Spans(const fused::Rule& rule, Hyper hyper, std::span<Update> updates, Pass pass)
      : declaration_(rule.declaration), used_(rule.kernel(hyper).states), updates_(updates), pass_(pass) {
    for (const Update& update : updates) {
      if (update.gradient.defined()) check(update);
    }
    parts_.reserve(updates.size());
    for (Update& update : updates) {
      if (update.gradient.defined()) add(update, hyper);
    }
  }

  std::span<fused::Part> parts() { return parts_; }

  // Calls `work(update, part)` for those that have a gradient.
  template <class Work>
  void each(const Work& work) {
    std::size_t i = 0;
    for (Update& update : updates_) {
      if (update.gradient.defined()) work(update, parts_[i++]);
    }
  }

  // Writes copies back to what they are copies of.
  void write_back() {
    for (auto& [original, dense] : copies_) original.copy_(dense);
  }

 private:
  void check(const Update& update) const {
    const char* name = declaration_.name;
    const at::Tensor& parameter = update.parameter;
    check_fits(parameter, parameter, "parameter", name);
    if (!parameter.is_same(update.gradient)) check_alone(parameter, name);  // measured gradients stand for both
    check_fits(update.gradient, parameter, "gradient", name);
    if (update.copy.defined()) check_fits(update.copy, parameter, "copy", name);
    for (const at::Tensor& tensor : update.state->tensors) {
      if (tensor.defined()) check_fits(tensor, parameter, "state", name);
    }
  }

  void add(Update& update, Hyper hyper) {
    const at::Tensor& parameter = update.parameter;
    const auto elements = static_cast<std::size_t>(update.elements.value_or(parameter.numel()));
    fused::Part part{.count = elements * (parameter.is_complex() ? 2 : 1),
                     .dtype = reals_of(parameter),
                     .gradient_dtype = reals_of(update.gradient),
                     .first = !update.state->started};
    // The order of elements in memory is the parameter's, or that of a dense tensor like it.
    const at::Tensor like = parameter.is_non_overlapping_and_dense() ? parameter : at::empty_like(parameter);
    const bool updates = pass_ == Pass::kUpdate;
    part.parameter = updates ? writable(parameter, like) : const_cast<void*>(readable(parameter, like));
    part.gradient = readable(update.gradient, like);
    if (update.copy.defined() && updates) {
      part.copy_dtype = reals_of(update.copy);
      part.copy = writable(update.copy, like);
    }
    add_states(*update.state, hyper, like, part);
    parts_.push_back(part);
  }

  void add_states(State& state, Hyper hyper, const at::Tensor& like, fused::Part& part) {
    std::size_t tensors = 0, numbers = 0;
    for (const auto& field : declaration_.states) {
      const double initial = *field.initial == '\0' ? 0 : hyper[fused::hyper_index(declaration_, field.initial)];
      if (field.kind == fused::StateKind::kNumber) {
        if (state.numbers.size() == numbers) state.numbers.push_back(initial);
        part.numbers[numbers] = state.numbers[numbers];
        ++numbers;
        continue;
      }
      if (state.tensors.size() == tensors) state.tensors.emplace_back();
      at::Tensor& tensor = state.tensors[tensors];
      if ((used_ >> tensors & 1) != 0) {
        if (!tensor.defined()) tensor = filled(like, initial);
        if (tensor.scalar_type() != like.scalar_type()) tensor = tensor.to(like.scalar_type());
        part.states[tensors] = writable(tensor, like);
      }
      ++tensors;
    }
  }

  // A complex number has the value in both of its parts.
  static at::Tensor filled(const at::Tensor& like, double value) {
    if (value == 0) return at::zeros_like(like);
    return at::full_like(like,
                         like.is_complex() ? c10::Scalar(c10::complex<double>(value, value)) : c10::Scalar(value));
  }

  static bool lies_like(const at::Tensor& tensor, const at::Tensor& like) {
    return tensor.strides() == like.strides() && !tensor.is_conj() && !tensor.is_neg();
  }

  at::Tensor dense_copy(const at::Tensor& tensor, const at::Tensor& like) {
    auto dense = at::empty_strided(like.sizes(), like.strides(), tensor.options());
    dense.copy_(tensor);
    return dense;
  }

  void* writable(const at::Tensor& tensor, const at::Tensor& like) {
    if (lies_like(tensor, like)) return tensor.mutable_data_ptr();
    return copies_.emplace_back(tensor, dense_copy(tensor, like)).second.mutable_data_ptr();
  }

  const void* readable(const at::Tensor& tensor, const at::Tensor& like) {
    if (lies_like(tensor, like)) return tensor.const_data_ptr();
    return kept_.emplace_back(dense_copy(tensor, like)).const_data_ptr();
  }

  const Declaration& declaration_;
  const std::uint32_t used_;
  const std::span<Update> updates_;
  const Pass pass_;
  std::vector<fused::Part> parts_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // original, dense
  std::vector<at::Tensor> kept_;
};

// Autograd notices that a tensor which it has saved was changed.
void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

void FusedFunctional::measure(const Step& step, std::span<Update> updates, Threads& threads) const {
  if (rule_.declaration.needs == fused::Needs::kElements) return;
  const at::NoGradGuard no_grad;
  Spans spans(rule_, step.hyper, updates, Spans::Pass::kMeasure);
  fused::measure({rule_, step.hyper, step.gradient_scale, step.gradient_norm}, spans.parts(), {threads});
  spans.write_back();
  spans.each([](Update& update, const fused::Part& part) { update.norms = part.norms; });
}

void FusedFunctional::update(const Step& step, std::span<Update> updates, Threads& threads) const {
  const at::NoGradGuard no_grad;
  Spans spans(rule_, step.hyper, updates, Spans::Pass::kUpdate);
  spans.each([](const Update& update, fused::Part& part) { part.norms = update.norms; });
  fused::update({rule_, step.hyper, step.gradient_scale, step.gradient_norm}, spans.parts(), {threads});
  spans.write_back();
  spans.each([](const Update& update, const fused::Part& part) {
    std::copy_n(part.numbers.begin(), update.state->numbers.size(), update.state->numbers.begin());
    update.state->started = true;
    bump_version(update.parameter);
    bump_version(update.copy);
  });
}

}  // namespace lamina::optim
