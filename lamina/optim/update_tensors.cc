// SPDX-License-Identifier: Apache-2.0
#include "lamina/optim/update_tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/Utils.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <optional>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"

namespace lamina::optim {
namespace {

using base::UsageError;
using layout::DType;

// True where a tensor is like `fitting`, which has been checked, so that the checks need not be made again.
bool is_as(const at::Tensor& tensor, const at::Tensor& fitting) {
  return tensor.key_set() == fitting.key_set() && tensor.dtype() == fitting.dtype() &&
         tensor.device() == fitting.device() && are_equal(tensor.sizes(), fitting.sizes());
}

// Refuses what belongs to a parameter and does not fit it.
void check_fits(const at::Tensor& tensor, const at::Tensor& parameter, const char* what, const char* optimizer) {
  if (!has_own_elements(tensor)) {
    throw UsageError(base::str(optimizer, ": a ", what,
                               " of a class that has its elements elsewhere (a tensor subclass ",
                               "with __torch_dispatch__, as DTensor); give it the local tensors"));
  }
  if (tensor.layout() == at::kMkldnn) {
    throw UsageError(base::str(optimizer, ": a ", what, " in oneDNN's layout; call to_dense() before"));
  }
  if (tensor.layout() != at::kStrided) {
    throw UsageError(base::str(optimizer, " does not support sparse gradients, please consider SparseAdam instead"));
  }
  if (tensor.device() != parameter.device()) {
    throw UsageError(base::str(optimizer, ": a ", what, " on ", tensor.device(), " for a parameter on ",
                               parameter.device(), "; move it there before the step"));
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

// Refuses elements that a program has taken the memory from, as sharding of others does between steps.
void check_memory(const at::Tensor& tensor, const char* what, const char* optimizer) {
  if (!devices::is_host(tensor) || tensor.numel() == 0 || tensor._is_zerotensor()) return;
  if (memory_of(tensor, false) != nullptr) return;
  throw UsageError(base::str(optimizer, ": a ", what, " of shape ", tensor.sizes(),
                             " has no memory: its storage was resized to nothing; give it back before the step"));
}

// Refuses a parameter of which several elements are one in memory: they cannot all have their values.
void check_alone(const at::Tensor& parameter, const char* optimizer) {
  if (at::has_internal_overlap(parameter) != at::MemOverlap::Yes) return;
  throw UsageError(base::str(optimizer, ": unsupported operation: more than one element of a parameter of shape ",
                             parameter.sizes(), " refers to a single memory location; clone() it before"));
}

constexpr std::size_t kLine = 64;                     // bytes that a processor fetches at once
constexpr std::size_t kRow = std::size_t{1} << 20;    // bytes of a row, all of which one state may keep alive
constexpr std::size_t kSmall = std::size_t{1} << 16;  // bytes of a state; one that is larger fills pages by itself

std::size_t bytes_in_row(const at::Tensor& tensor) { return (tensor.nbytes() + kLine - 1) / kLine * kLine; }

at::Tensor dense_copy(const at::Tensor& tensor, const at::Tensor& like) {
  auto dense = at::empty_strided(like.sizes(), like.strides(), tensor.options());
  dense.copy_(tensor);
  return dense;
}

}  // namespace

bool has_own_elements(const at::Tensor& tensor) { return !tensor.key_set().has(c10::DispatchKey::Python); }

void check_update(const Declaration& declaration, const Update& update) {
  const char* name = declaration.name;
  const at::Tensor& parameter = *update.parameter;
  check_fits(parameter, parameter, "parameter", name);
  check_memory(parameter, "parameter", name);
  if (!parameter.is_same(*update.gradient)) check_alone(parameter, name);  // measured gradients stand for both
  const auto check = [&](const at::Tensor& tensor, const char* what) {
    if (!is_as(tensor, parameter)) check_fits(tensor, parameter, what, name);
    check_memory(tensor, what, name);
  };
  check(*update.gradient, "gradient");
  if (update.copy.defined()) check(update.copy, "copy");
  for (const at::Tensor& tensor : update.state->tensors) {
    if (tensor.defined()) check(tensor, "state");
  }
}

bool torchs_numbers_are_double() { return at::get_default_dtype_as_scalartype() == at::kDouble; }

c10::MaybeOwned<at::Tensor> dense_like(const at::Tensor& parameter) {
  using Like = c10::MaybeOwned<at::Tensor>;
  return parameter.is_non_overlapping_and_dense() ? Like::borrowed(parameter) : Like::owned(at::empty_like(parameter));
}

void StateMaker::expect(const at::Tensor& like) {
  if (like.nbytes() <= kSmall) expected_ += bytes_in_row(like);
}

at::Tensor StateMaker::make(const at::Tensor& like, std::size_t state, double value) {
  auto tensor = place(like, state);
  if (!tensor.defined()) tensor = at::empty_like(like);
  return tensor.fill_(like.is_complex() ? c10::Scalar(c10::complex<double>(value, value)) : c10::Scalar(value));
}

at::Tensor StateMaker::place(const at::Tensor& like, std::size_t state) {
  Row& row = rows_.at(state);
  const std::size_t bytes = bytes_in_row(like);
  if (like.numel() == 0 || like.nbytes() > kSmall || row.made + bytes > expected_) return {};
  if (!row.bytes.defined() || row.used + bytes > row.bytes.nbytes()) {
    // Kinds begin at different places of a page, so that elements of one place do not take each other's in the cache.
    row.used = state * (4096 / fused::kMostStates + kLine);
    const std::size_t size = row.used + std::clamp(expected_ - row.made, bytes, kRow);
    row.bytes = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
  }
  auto* const begin = row.bytes.mutable_data_ptr<std::uint8_t>() + row.used;
  row.used += bytes;
  row.made += bytes;
  return at::for_blob(begin, like.sizes())
      .strides(like.strides())
      .deleter([kept = row.bytes](void*) {})
      .options(like.options())
      .allocator(c10::GetCPUAllocator())
      .resizeable_storage()
      .make_tensor();
}

void make_states(const Declaration& declaration, std::uint32_t used, Hyper hyper, const at::Tensor& like, State& state,
                 StateMaker& maker) {
  std::size_t tensors = 0, numbers = 0;
  for (const auto& field : declaration.states) {
    const double initial = *field.initial == '\0' ? 0 : hyper[fused::hyper_index(declaration, field.initial)];
    if (fused::is_number(field.kind)) {
      if (state.numbers.size() == numbers++) {
        state.numbers.push_back(initial);
        state.made = true;
      }
      continue;
    }
    if (state.tensors.size() == tensors) state.tensors.emplace_back();
    const std::size_t place = tensors++;
    at::Tensor& tensor = state.tensors[place];
    if ((used >> place & 1) == 0) continue;
    if (tensor.defined() && tensor.scalar_type() == like.scalar_type()) continue;
    tensor = tensor.defined() ? tensor.to(like.scalar_type()) : maker.make(like, place, initial);
    state.made = true;
  }
}

void start(std::uint32_t used, State& state) {
  const bool holds_none = used == 0 && state.numbers.empty() && !state.tensors.empty();
  state.started = state.started || !holds_none;
}

const at::Tensor& DenseCopies::writable(const at::Tensor& tensor, const at::Tensor& like) {
  if (lies_like(tensor, like)) return tensor;
  return copies_.emplace_back(tensor, dense_copy(tensor, like)).second;
}

const at::Tensor& DenseCopies::readable(const at::Tensor& tensor, const at::Tensor& like) {
  if (lies_like(tensor, like)) return tensor;
  return kept_.emplace_back(dense_copy(tensor, like));
}

void DenseCopies::write_back() {
  for (auto& [original, dense] : copies_) original.copy_(dense);
}

}  // namespace lamina::optim
