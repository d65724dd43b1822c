// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/fused_functional.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/optim/update_tensors.h"
#include "lamina/optim/whole_tensors.h"

namespace lamina::optim {
namespace {

// The work of a pass: spans of memory for the loops, with the copies that some need, and whole tensors. All updates are
// checked before anything is made for one.
class Work {
 public:
  Work(const fused::Rule& rule, Way way, Hyper hyper, std::span<Update> updates, Pass pass)
      : declaration_(rule.declaration),
        kernel_(rule.kernel(hyper)),
        tensors_(static_cast<std::size_t>(std::ranges::count_if(
            declaration_.states, [](const auto& field) { return !fused::is_number(field.kind); }))),
        writes_(pass == Pass::kUpdate) {
    updates_.reserve(updates.size());
    parts_.reserve(updates.size());
    const fused::Part none;           // copied, which is faster than to clear one in its place
    std::vector<std::size_t> others;  // places of the parts that more has to be done for
    for (Update& update : updates) {
      if (!update.gradient->defined()) continue;
      if (way == Way::kByDevice && is_plain(update)) {
        parts_.push_back(none);
        if (fill(parts_.back(), update, memory_of)) {
          updates_.push_back(&update);
          continue;
        }
        parts_.pop_back();
      }
      check_update(declaration_, update);
      if (way == Way::kByDevice && devices::is_host(*update.parameter)) {
        others.push_back(parts_.size());
        updates_.push_back(&update);
        parts_.emplace_back();
        if (lies_like(*update.parameter, *update.parameter)) plain_ = update.parameter->key_set();
      } else {
        whole_.push_back(&update);
      }
    }
    if (!whole_.empty() && kernel_.update_arrays == nullptr) {
      throw base::UsageError(base::str("the optimizer ", declaration_.name,
                                       " is a shared library's, which updates parameters on the CPU alone; one is on ",
                                       whole_.front()->parameter->device()));
    }
    StateMaker maker;
    for (const auto i : others) {
      if (lacks_a_state(*updates_[i])) maker.expect(*updates_[i]->parameter);
    }
    for (const auto i : others) make(parts_[i], *updates_[i], hyper, maker);
  }

  // How many states of a parameter are numbers.
  std::size_t numbers() const { return declaration_.states.size() - tensors_; }

  std::span<fused::Part> parts() { return parts_; }
  std::span<Update* const> whole() const { return whole_; }

  // Calls `work(update, part)` for each part.
  template <class Each>
  void each(const Each& work) {
    for (std::size_t i = 0; i < parts_.size(); ++i) work(*updates_[i], parts_[i]);
  }

  void write_back() { copies_.write_back(); }

 private:
  // True of most: a dense parameter of a kind that was checked, all else lies like it, and nothing is missing.
  [[gnu::flatten]] bool is_plain(const Update& update) const {
    const at::Tensor& parameter = *update.parameter;
    const auto fits = [&](const at::Tensor& tensor) {
      return tensor.key_set() == plain_ && are_equal(tensor.sizes(), parameter.sizes()) &&
             are_equal(tensor.strides(), parameter.strides()) && reals_in(tensor.scalar_type()).has_value() &&
             tensor.is_complex() == parameter.is_complex();
    };
    const State& state = *update.state;
    bool plain = parameter.is_non_overlapping_and_dense() && fits(parameter) && fits(*update.gradient) &&
                 (!update.copy.defined() || fits(update.copy)) && state.tensors.size() == tensors_ &&
                 state.numbers.size() == numbers();
    for (std::size_t k = 0; plain && k < tensors_; ++k) {
      const at::Tensor& tensor = state.tensors[k];
      plain = !uses(k) || (tensor.defined() && tensor.dtype() == parameter.dtype() && fits(tensor));
    }
    return plain;
  }

  // Makes the states and the dense copies that are missing.
  void make(fused::Part& part, Update& update, Hyper hyper, StateMaker& maker) {
    const auto dense = dense_like(*update.parameter);
    make_states(declaration_, kernel_.states, hyper, *dense, *update.state, maker);
    fill(part, update, [&](const at::Tensor& tensor, bool writes) {
      return memory_of(writes ? copies_.writable(tensor, *dense) : copies_.readable(tensor, *dense), writes);
    });
  }

  // Sets all but norms, and says whether all has memory. `memory`: of a tensor, which is written or not.
  template <class Memory>
  [[gnu::flatten]] bool fill(fused::Part& part, const Update& update, const Memory& memory) {
    const at::Tensor& parameter = *update.parameter;
    const State& state = *update.state;
    const auto elements = static_cast<std::size_t>(update.elements.value_or(parameter.numel()));
    part.count = elements * (parameter.is_complex() ? 2 : 1);
    part.dtype = reals_of(parameter);
    part.gradient_dtype = reals_of(*update.gradient);
    part.parameter = memory(parameter, writes_);
    part.gradient = memory(*update.gradient, false);
    bool found = part.parameter != nullptr && part.gradient != nullptr;
    if (update.copy.defined() && writes_) {
      part.copy_dtype = reals_of(update.copy);
      part.copy = memory(update.copy, true);
      found = found && part.copy != nullptr;
    }
    part.first = !state.started;
    std::ranges::copy(state.numbers, part.numbers.begin());
    for (std::size_t k = 0; k < state.tensors.size(); ++k) {
      if (!uses(k)) continue;
      part.states[k] = memory(state.tensors[k], true);
      found = found && part.states[k] != nullptr;
    }
    return found;
  }

  bool lacks_a_state(const Update& update) const {
    const auto& tensors = update.state->tensors;
    bool lacks = false;
    for (std::size_t k = 0; k < tensors_; ++k) lacks |= uses(k) && (k >= tensors.size() || !tensors[k].defined());
    return lacks;
  }

  bool uses(std::size_t state) const { return (kernel_.states >> state & 1) != 0; }

  const Declaration& declaration_;
  const fused::Kernel kernel_;
  const std::size_t tensors_;     // among the states
  const bool writes_;             // the parameters
  c10::DispatchKeySet plain_;     // of a parameter that was checked, and has its elements as they are
  std::vector<Update*> updates_;  // a part for each
  std::vector<fused::Part> parts_;
  std::vector<Update*> whole_;
  DenseCopies copies_;
};

[[gnu::flatten]] void bump_version(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Autograd notices that tensors which it may have saved are changed.
void bump_versions(const Update& update) {
  bump_version(*update.parameter);
  bump_version(update.copy);
  for (const at::Tensor& tensor : update.state->tensors) bump_version(tensor);
}

}  // namespace

void FusedFunctional::measure(std::span<const StepOf> groups, Threads& threads) const {
  if (rule_.declaration.needs == fused::Needs::kElements) return;
  const at::NoGradGuard no_grad;
  WholeNorms norms;
  for (const auto& [step, updates] : groups) {
    Work work(rule_, way_, step.hyper, updates, Pass::kMeasure);
    fused::measure({rule_, step.hyper, step.gradient_scale, step.gradient_norm, torchs_numbers_are_double()},
                   work.parts(), {threads});
    work.write_back();
    work.each([](Update& update, const fused::Part& part) { update.norms = part.norms; });
    norms.measure(rule_, step, work.whole());
  }
  norms.read();
}

void FusedFunctional::update(const Step& step, std::span<Update> updates, Threads& threads) const {
  const at::NoGradGuard no_grad;
  Work work(rule_, way_, step.hyper, updates, Pass::kUpdate);
  const auto used = rule_.kernel(step.hyper).states;
  work.each([used](const Update& update, fused::Part& part) {
    part.norms = update.norms;
    start(used, *update.state);
    bump_versions(update);
  });
  fused::update({rule_, step.hyper, step.gradient_scale, step.gradient_norm, torchs_numbers_are_double()}, work.parts(),
                {threads});
  work.write_back();
  if (work.numbers() > 0) {
    work.each([](const Update& update, const fused::Part& part) {
      std::copy_n(part.numbers.begin(), update.state->numbers.size(), update.state->numbers.begin());
    });
  }
  update_whole_tensors(rule_, step, work.whole(), way_ != Way::kWholeTensorsByTheRule);
  for (const auto* update : work.whole()) bump_versions(*update);
}

}  // namespace lamina::optim
