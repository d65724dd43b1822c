// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/fused_functional.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/optim/update_tensors.h"
#include "lamina/optim/whole_tensors.h"

namespace lamina::optim {
namespace {

// The spans of a list of updates, with the copies that some of them need.
class Spans {
 public:
  Spans(const fused::Rule& rule, Hyper hyper, std::span<Update* const> updates, Pass pass)
      : declaration_(rule.declaration), used_(rule.kernel(hyper).states), updates_(updates), pass_(pass) {
    parts_.reserve(updates.size());
    for (Update* update : updates) add(*update, hyper);
  }

  std::span<fused::Part> parts() { return parts_; }

  // Calls `work(update, part)` for each.
  template <class Work>
  void each(const Work& work) {
    for (std::size_t i = 0; i < parts_.size(); ++i) work(*updates_[i], parts_[i]);
  }

  void write_back() { copies_.write_back(); }

 private:
  void add(Update& update, Hyper hyper) {
    const at::Tensor& parameter = update.parameter;
    State& state = *update.state;
    const auto elements = static_cast<std::size_t>(update.elements.value_or(parameter.numel()));
    fused::Part part{.count = elements * (parameter.is_complex() ? 2 : 1),
                     .dtype = reals_of(parameter),
                     .gradient_dtype = reals_of(update.gradient),
                     .first = !state.started};
    const auto dense = dense_like(parameter);
    const at::Tensor& like = *dense;
    const bool updates = pass_ == Pass::kUpdate;
    part.parameter = updates ? copies_.writable(parameter, like).mutable_data_ptr()
                             : const_cast<void*>(copies_.readable(parameter, like).const_data_ptr());
    part.gradient = copies_.readable(update.gradient, like).const_data_ptr();
    if (update.copy.defined() && updates) {
      part.copy_dtype = reals_of(update.copy);
      part.copy = copies_.writable(update.copy, like).mutable_data_ptr();
    }
    make_states(declaration_, used_, hyper, like, state);
    std::ranges::copy(state.numbers, part.numbers.begin());
    for (std::size_t k = 0; k < state.tensors.size(); ++k) {
      if ((used_ >> k & 1) != 0) part.states[k] = copies_.writable(state.tensors[k], like).mutable_data_ptr();
    }
    parts_.push_back(part);
  }

  const Declaration& declaration_;
  const std::uint32_t used_;
  const std::span<Update* const> updates_;
  const Pass pass_;
  std::vector<fused::Part> parts_;
  DenseCopies copies_;
};

// Autograd notices that a tensor which it has saved was changed.
void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

FusedFunctional::Divided FusedFunctional::divided(std::span<Update> updates, Hyper hyper) const {
  Divided divided;
  divided.in_memory.reserve(updates.size());
  for (Update& update : updates) {
    if (!update.gradient.defined()) continue;
    check_update(rule_.declaration, update);
    const bool loops = way_ == Way::kByDevice && update.parameter.is_cpu();
    (loops ? divided.in_memory : divided.whole).push_back(&update);
  }
  if (!divided.whole.empty() && rule_.kernel(hyper).update_arrays == nullptr) {
    throw base::UsageError(base::str("the optimizer ", rule_.declaration.name,
                                     " is a shared library's, which updates parameters on the CPU alone; one is on ",
                                     divided.whole.front()->parameter.device()));
  }
  return divided;
}

void FusedFunctional::measure(const Step& step, std::span<Update> updates, Threads& threads) const {
  if (rule_.declaration.needs == fused::Needs::kElements) return;
  const at::NoGradGuard no_grad;
  const auto [in_memory, whole] = divided(updates, step.hyper);
  Spans spans(rule_, step.hyper, in_memory, Pass::kMeasure);
  fused::measure({rule_, step.hyper, step.gradient_scale, step.gradient_norm, torchs_numbers_are_double()},
                 spans.parts(), {threads});
  spans.write_back();
  spans.each([](Update& update, const fused::Part& part) { update.norms = part.norms; });
  measure_whole_tensors(rule_, step, whole);
}

void FusedFunctional::update(const Step& step, std::span<Update> updates, Threads& threads) const {
  const at::NoGradGuard no_grad;
  const auto [in_memory, whole] = divided(updates, step.hyper);
  Spans spans(rule_, step.hyper, in_memory, Pass::kUpdate);
  spans.each([](const Update& update, fused::Part& part) { part.norms = update.norms; });
  fused::update({rule_, step.hyper, step.gradient_scale, step.gradient_norm, torchs_numbers_are_double()},
                spans.parts(), {threads});
  spans.write_back();
  const auto used = rule_.kernel(step.hyper).states;
  spans.each([used](const Update& update, const fused::Part& part) {
    std::copy_n(part.numbers.begin(), update.state->numbers.size(), update.state->numbers.begin());
    start(used, *update.state);
    bump_version(update.parameter);
    bump_version(update.copy);
  });
  update_whole_tensors(rule_, step, whole, way_ != Way::kWholeTensorsByTheRule);
  for (const auto* update : whole) {
    bump_version(update->parameter);
    bump_version(update->copy);
  }
}

}  // namespace lamina::optim
