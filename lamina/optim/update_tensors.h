// SPDX-License-Identifier: Apache-2.0
// Checks, states and copies, for updates over memory and over whole tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "lamina/layout/dtype.h"
#include "lamina/optim/functional.h"

namespace lamina::optim {

// False for subclasses of Python with a dispatch of their own, such as DTensor: their memory is not their elements.
bool has_own_elements(const at::Tensor& tensor);

// The type of the reals that a tensor holds, which is one that rules update.
layout::DType reals_of(const at::Tensor& tensor);

// Throws UsageError for what does not belong together, or cannot be updated.
void check_update(const Declaration& declaration, const Update& update);

// True where torch's classes keep numbers of a state in double precision; else they do in float32.
bool torchs_numbers_are_double();

// A tensor of the parameter's shape, with an element for each place in memory.
c10::MaybeOwned<at::Tensor> dense_like(const at::Tensor& parameter);

// Makes the states that are missing, a bit in `used` for each that lies like the parameter.
void make_states(const Declaration& declaration, std::uint32_t used, Hyper hyper, const at::Tensor& like, State& state);

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
