// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "lamina/device/generators.h"

namespace lamina::runtime {

// State that torch keeps once per process and a step body expects to be its own: the states of the host's generator and
// of that of the rank's device, and the default dtype. It moves with the compute slot: see ExecutionContext. Generators
// of other devices are left as they are.
//
// Where several jobs of one process compute at once, as in tests, they share the generators, whose numbers are then
// anybody's.
class ProcessState {
 public:
  static ProcessState current();  // a copy of the process's

  // Its generators begin anew, as after torch.manual_seed(seed).
  void seed(std::uint64_t seed);

  // Exchanges it with the process's: two copies of 2.5 KB, and of what a device's generator has.
  void swap();
  // Exchanges the generators' part alone.
  void swap_generators();

 private:
  explicit ProcessState(const at::mt19937& engine) : engine_(engine) {}  // a new one costs 1 us to seed

  at::mt19937 engine_;
  std::optional<float> next_float_normal_;
  std::optional<double> next_double_normal_;
  devices::GeneratorState of_device_;
  at::ScalarType default_dtype_ = at::kFloat;
};

void set_default_dtype(at::ScalarType dtype);  // of the process

}  // namespace lamina::runtime
