// SPDX-License-Identifier: Apache-2.0
// Parameters go through a rule in batches: those that have a type, a device and flags in common, together with their
// gradients and states, each as a row of elements. A batch is small enough that what is computed in between takes
// little memory beside the parameters'.
#include "lamina/optim/whole_tensors.h"

#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/optim/tensor_lists.h"
#include "lamina/optim/torch_updates.h"
#include "lamina/optim/update_tensors.h"

namespace lamina::optim {
namespace {

using fused::Coefficients;
using fused::kMostStates;
using fused::Value;

constexpr std::int64_t kElementsAtOnce = std::int64_t{1} << 24;

// Columns are parameters that are updated together; a column may be a piece of one that is large.
struct Batch {
  std::vector<at::Tensor> parameters, gradients, copies;
  std::array<std::vector<at::Tensor>, kMostStates> states;  // as declared; empty where unused
  std::vector<const Coefficients*> coefficients;
  std::vector<double> steps;
  std::vector<std::size_t> updates;  // their places in the list
  bool first = false;
  std::int64_t elements = 0;
};

// The elements of a dense tensor in their order in memory, complex ones as two.
at::Tensor row_of(const at::Tensor& dense, std::int64_t elements) {
  const auto row = dense.as_strided({elements}, {1});
  return row.is_complex() ? at::view_as_real(row).view(-1) : row;
}

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

// std::vector<at::Tensor> in another type, if that is another.
std::vector<at::Tensor> in_type(const std::vector<at::Tensor>& tensors, at::ScalarType type) {
  std::vector<at::Tensor> all;
  all.reserve(tensors.size());
  for (const auto& tensor : tensors) all.push_back(tensor.scalar_type() == type ? tensor : tensor.to(type));
  return all;
}

// Writes a value that is not in this memory yet.
void store(const Value& value, const std::vector<at::Tensor>& memory) {
  const auto& tensors = tensors_of(value);
  if (!tensors.front().is_same(memory.front())) at::_foreach_copy_(memory, tensors);
}

class Batches {
 public:
  Batches(const fused::Rule& rule, const Step& step, std::span<Update* const> updates, Pass pass)
      : rule_(rule), step_(step), kernel_(rule.kernel(step.hyper)), updates_(updates), pass_(pass) {
    coefficients_.reserve(updates.size());
    for (std::size_t i = 0; i < updates.size(); ++i) add(i);
  }

  // Calls `take` with each norm of a piece, its update, and its number among the norms of that.
  template <class Take>
  void measure(const Take& take) {
    for (auto* update : updates_) update->norms = {};
    const auto combine = rule_.declaration.norms;
    for (auto& batch : batches_) {
      auto operands = operands_of(batch);
      const auto values = kernel_.measure_arrays(coefficients_of(batch), operands);
      store_states(operands, batch);
      for (std::size_t k = 0; k < combine.size(); ++k) {
        if (!values[k].arrays()) continue;
        const double order = combine[k] == fused::Combine::kSum ? 2 : std::numeric_limits<double>::infinity();
        const auto norms = at::_foreach_norm(tensors_of(values[k]), order, at::kDouble);
        for (std::size_t n = 0; n < norms.size(); ++n) take(norms[n], *updates_[batch.updates[n]], k);
      }
    }
    copies_.write_back();
  }

  void update(bool by_torch) {
    for (auto& batch : batches_) update(batch, by_torch);
    copies_.write_back();
    for (std::size_t i = 0; i < updates_.size(); ++i) {
      auto& state = *updates_[i]->state;
      std::copy_n(numbers_[i].begin(), state.numbers.size(), state.numbers.begin());
      start(kernel_.states, state);
    }
  }

 private:
  void add(std::size_t i) {
    Update& update = *updates_[i];
    State& state = *update.state;
    const auto dense = dense_like(*update.parameter);
    const at::Tensor& like = *dense;
    make_states(rule_.declaration, kernel_.states, step_.hyper, like, state, maker_);
    fused::Numbers numbers{};
    std::ranges::copy(state.numbers, numbers.begin());
    const double steps_before = numbers[0];
    const fused::Moment moment{rule_.context, !state.started, step_.gradient_norm, torchs_numbers_are_double()};
    auto& coefficients = coefficients_.emplace_back(rule_.prepare(step_.hyper, moment, numbers));
    if (pass_ == Pass::kUpdate && rule_.finish != nullptr) {
      rule_.finish(step_.hyper, update.norms, moment, numbers, coefficients);
    }
    numbers_.push_back(numbers);

    const auto elements = update.elements.value_or(update.parameter->numel());
    const auto row = [&](const at::Tensor& dense) { return row_of(dense, elements); };
    const bool updates = pass_ == Pass::kUpdate;
    const auto parameter =
        row(updates ? copies_.writable(*update.parameter, like) : copies_.readable(*update.parameter, like));
    const auto gradient = row(copies_.readable(*update.gradient, like));
    const bool has_copy = updates && update.copy.defined();
    const auto copy = has_copy ? row(copies_.writable(update.copy, like)) : at::Tensor();
    std::array<at::Tensor, kMostStates> states;
    for (std::size_t k = 0; k < state.tensors.size(); ++k) {
      if (uses(k)) states[k] = row(copies_.writable(state.tensors[k], like));
    }
    for (std::int64_t begin = 0; begin < parameter.numel(); begin += kElementsAtOnce) {
      const auto count = std::min(kElementsAtOnce, parameter.numel() - begin);
      Batch& batch = batch_for(parameter, gradient, copy, !state.started, coefficients, count);
      const auto piece = [&](const at::Tensor& all) {
        return count == parameter.numel() ? all : all.narrow(0, begin, count);
      };
      batch.parameters.push_back(piece(parameter));
      batch.gradients.push_back(piece(gradient));
      if (has_copy) batch.copies.push_back(piece(copy));
      for (std::size_t k = 0; k < kMostStates; ++k) {
        if (states[k].defined()) batch.states[k].push_back(piece(states[k]));
      }
      batch.coefficients.push_back(&coefficients);
      batch.steps.push_back(steps_before);
      batch.updates.push_back(i);
      batch.elements += count;
    }
  }

  bool uses(std::size_t state) const { return (kernel_.states >> state & 1) != 0; }

  // The last batch that such a column may be added to; rules look at coefficients only to see whether they are zero.
  Batch& batch_for(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& copy, bool first,
                   const Coefficients& coefficients, std::int64_t count) {
    const auto type_of = [](const at::Tensor& tensor) {
      return tensor.defined() ? tensor.scalar_type() : at::ScalarType::Undefined;
    };
    const auto alike = [&](const Batch& batch) {
      const auto& other_copy = batch.copies.empty() ? at::Tensor() : batch.copies.front();
      return batch.first == first && batch.parameters.front().device() == parameter.device() &&
             type_of(batch.parameters.front()) == type_of(parameter) &&
             type_of(batch.gradients.front()) == type_of(gradient) && type_of(other_copy) == type_of(copy) &&
             std::ranges::equal(*batch.coefficients.front(), coefficients, {}, is_zero, is_zero);
    };
    for (std::size_t i = batches_.size(); i-- > 0;) {
      if (alike(batches_[i]) && batches_[i].elements + count <= kElementsAtOnce) return batches_[i];
    }
    auto& batch = batches_.emplace_back();
    batch.first = first;
    return batch;
  }

  static bool is_zero(double value) { return value == 0; }

  // The gradients, in a type, multiplied by the scale.
  std::vector<at::Tensor> gradients_in(at::ScalarType type, const Batch& batch) const {
    auto gradients = in_type(batch.gradients, type);
    if (step_.gradient_scale == 1) return gradients;
    return at::_foreach_mul(gradients, step_.gradient_scale);
  }

  fused::Operands operands_of(const Batch& batch) const {
    const auto stored = batch.parameters.front().scalar_type();
    const auto type = is_half(stored) ? at::kFloat : stored;
    fused::Operands operands{.parameter = value_of(in_type(batch.parameters, type)),
                             .gradient = value_of(gradients_in(type, batch)),
                             .states = {}};
    std::size_t used = 0;
    for (const auto& states : batch.states) {
      if (!states.empty()) operands.states[used++] = value_of(in_type(states, type));
    }
    return operands;
  }

  static std::vector<Value> coefficients_of(const Batch& batch) {
    std::vector<Value> values;
    for (std::size_t k = 0; k < Coefficients().size(); ++k) {
      std::vector<double> numbers;
      for (const auto* coefficients : batch.coefficients) numbers.push_back((*coefficients)[k]);
      if (std::ranges::adjacent_find(numbers, std::ranges::not_equal_to()) == numbers.end()) numbers.resize(1);
      values.emplace_back(std::move(numbers));
    }
    return values;
  }

  static void store_states(const fused::Operands& operands, const Batch& batch) {
    std::size_t used = 0;
    for (const auto& states : batch.states) {
      if (!states.empty()) store(operands.states[used++], states);
    }
  }

  void update(Batch& batch, bool by_torch) {
    if (!by_torch || !update_by_torch(batch)) {
      auto operands = operands_of(batch);
      kernel_.update_arrays(coefficients_of(batch), operands);
      store_states(operands, batch);
      store(operands.parameter, batch.parameters);
    }
    if (!batch.copies.empty()) at::_foreach_copy_(batch.copies, batch.parameters);
  }

  // False for half precision, too: it is computed in float32 here, which torch's do not promise.
  bool update_by_torch(Batch& batch) const {
    const auto type = batch.parameters.front().scalar_type();
    const auto update = is_half(type) ? nullptr : torch_update(rule_, step_.hyper, batch.parameters.front());
    if (!update) return false;
    update({batch.parameters, gradients_in(type, batch), batch.states, batch.steps, batch.first});
    return true;
  }

  const fused::Rule& rule_;
  const Step& step_;
  const fused::Kernel kernel_;
  const std::span<Update* const> updates_;
  const Pass pass_;
  std::vector<Coefficients> coefficients_;  // of the updates
  std::vector<fused::Numbers> numbers_;     // that they have afterwards
  std::vector<Batch> batches_;
  DenseCopies copies_;
  StateMaker maker_;
};

}  // namespace

void WholeNorms::measure(const fused::Rule& rule, const Step& step, std::span<Update* const> updates) {
  Batches(rule, step, updates, Pass::kMeasure).measure([&](const at::Tensor& norm, Update& update, std::size_t k) {
    auto& [norms, pieces] = on(norm.device());
    norms.push_back(norm);
    pieces.push_back({&update, k, rule.declaration.norms[k]});
  });
}

WholeNorms::Measured& WholeNorms::on(at::Device device) {
  const auto known =
      std::ranges::find(devices_, device, [](const Measured& measured) { return measured.norms.front().device(); });
  return known == devices_.end() ? devices_.emplace_back() : *known;
}

void WholeNorms::read() {
  for (const auto& [norms, pieces] : devices_) {
    const auto here = devices::on_host(at::stack(norms));
    for (std::size_t n = 0; n < pieces.size(); ++n) {
      const auto& [update, k, combine] = pieces[n];
      const double norm = here.const_data_ptr<double>()[n];
      double& all = update->norms[k];
      all = fused::combined(combine, all, combine == fused::Combine::kSum ? norm * norm : norm);
    }
  }
  devices_.clear();
}

void update_whole_tensors(const fused::Rule& rule, const Step& step, std::span<Update* const> updates, bool by_torch) {
  Batches(rule, step, updates, Pass::kUpdate).update(by_torch);
}

}  // namespace lamina::optim
