// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

namespace lamina::runtime {

// State that torch keeps once per process and a step body expects to be its own: the state of the CPU generator and the
// default dtype. It moves with the compute slot: see ExecutionContext. The generators of CUDA devices are left as they
// are.
//
// Where several jobs of one process compute at once, as in tests, they share one generator: its numbers are then
// anybody's.
class ProcessState {
 public:
  static ProcessState current();  // a copy of the process's

  // Its generator begins anew, as after torch.manual_seed(seed).
  void seed(std::uint64_t seed);

  // Exchanges it with the process's: two copies of 2.5 KB.
  void swap();
  // Exchanges the generator's part alone.
  void swap_generator();

 private:
  explicit ProcessState(const at::mt19937& engine) : engine_(engine) {}  // a new one costs 1 us to seed

  at::mt19937 engine_;
  std::optional<float> next_float_normal_;
  std::optional<double> next_double_normal_;
  at::ScalarType default_dtype_ = at::kFloat;
};

void set_default_dtype(at::ScalarType dtype);  // of the process

}  // namespace lamina::runtime
