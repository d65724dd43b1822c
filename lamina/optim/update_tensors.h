// SPDX-License-Identifier: Apache-2.0
// Checks, states and copies, for updates over memory and over whole tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "lamina/layout/dtype.h"
#include "lamina/optim/functional.h"

namespace lamina::optim {

// False for subclasses of Python with a dispatch of their own, such as DTensor: their memory is not their elements.
bool has_own_elements(const at::Tensor& tensor);

// The type of the reals that tensors of a type hold, where rules update it.
inline std::optional<layout::DType> reals_in(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kComplexFloat:
      return layout::DType::kFloat32;
    case at::kDouble:
    case at::kComplexDouble:
      return layout::DType::kFloat64;
    case at::kHalf:
      return layout::DType::kFloat16;
    case at::kBFloat16:
      return layout::DType::kBFloat16;
    default:
      return {};
  }
}

// The real type of a tensor that check_update() has accepted.
inline layout::DType reals_of(const at::Tensor& tensor) { return *reals_in(tensor.scalar_type()); }

// Compares in line: a call would take longer than the comparison.
inline bool are_equal(at::IntArrayRef a, at::IntArrayRef b) {
  bool equal = a.size() == b.size();
  for (std::size_t i = 0; equal && i < a.size(); ++i) equal = a[i] == b[i];
  return equal;
}

// True where a tensor of the same sizes as `like` lies in memory in the same order, with its elements as they are:
// neither conjugated nor negated.
inline bool lies_like(const at::Tensor& tensor, const at::Tensor& like) {
  constexpr c10::DispatchKeySet kOtherwise{c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
                                           c10::DispatchKey::ZeroTensor};
  return are_equal(tensor.strides(), like.strides()) && !tensor.key_set().has_any(kOtherwise);
}

// The first element of a tensor in memory; null where there is no memory.
inline void* memory_of(const at::Tensor& tensor, bool writes) {
  const auto& impl = *tensor.unsafeGetTensorImpl();
  const auto& storage = impl.unsafe_storage();
  auto* const memory = static_cast<std::byte*>(writes ? storage.mutable_data() : const_cast<void*>(storage.data()));
  const auto offset = static_cast<std::size_t>(impl.storage_offset());
  return memory == nullptr || offset == 0 ? memory : memory + impl.itemsize() * offset;
}

// Throws UsageError for what does not belong together, or cannot be updated.
void check_update(const Declaration& declaration, const Update& update);

// True where torch's classes keep numbers of a state in double precision; else they do in float32.
bool torchs_numbers_are_double();

// A tensor of the parameter's shape, with an element for each place in memory.
c10::MaybeOwned<at::Tensor> dense_like(const at::Tensor& parameter);

// Makes states. States of small parameters lie behind each other in rows, so that a step over many of them reads memory
// in order. Each has a storage of its own. A row lives as long as one of them does.
class StateMaker {
 public:
  // Notes that states of a parameter in the processor's memory will be made.
  void expect(const at::Tensor& like);

  // A tensor that lies like a parameter, with the value in all elements; in both parts of a complex number.
  // `state`: its place among those of the parameter.
  at::Tensor make(const at::Tensor& like, std::size_t state, double value);

 private:
  // States of one kind, one after the other.
  struct Row {
    at::Tensor bytes;
    std::size_t used = 0;
    std::size_t made = 0;  // bytes in all rows of the kind
  };

  // Uninitialised, in a row; undefined where it is not expected there.
  at::Tensor place(const at::Tensor& like, std::size_t state);

  std::size_t expected_ = 0;  // bytes of each kind
  std::array<Row, fused::kMostStates> rows_;
};

// Makes the states that are missing, a bit in `used` for each that lies like the parameter.
void make_states(const Declaration& declaration, std::uint32_t used, Hyper hyper, const at::Tensor& like, State& state,
                 StateMaker& maker);

// Notes that a step has used what `make_states` made.
void start(std::uint32_t used, State& state);

// Tensors whose elements lie as those of another one; others get copies that do.
class DenseCopies {
 public:
  // Valid until the next call.
  const at::Tensor& writable(const at::Tensor& tensor, const at::Tensor& like);
  const at::Tensor& readable(const at::Tensor& tensor, const at::Tensor& like);

  // Writes copies back to what they are copies of.
  void write_back();

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // original, dense
  std::vector<at::Tensor> kept_;
};

}  // namespace lamina::optim
