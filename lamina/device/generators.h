// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

// [Note: generators of devices] Of an accelerator's generator the host keeps the state: a seed, and how much was drawn.
// So reading and setting it are work of the host, and nothing waits for the device. Where the rank's device is the
// host, there is no second generator, and nothing here costs anything.
namespace lamina::devices {

// The generator of the rank's device; undefined where that is the host.
at::Generator rank_generator();

// Copies of a generator's state. They take its lock.
at::Tensor state_of(at::Generator generator);
void set_state(at::Generator generator, const at::Tensor& state);
// False where set_state() would throw.
bool takes_state(const at::Generator& generator, const at::Tensor& state);

// True where the rank's device has drawn numbers since its generator was seeded with `seed`.
bool has_drawn_since(std::uint64_t seed);

// A state of the generator of the rank's device, that a thread may have for its own.
class GeneratorState {
 public:
  static GeneratorState current();  // a copy of the device's

  void seed(std::uint64_t seed) { seed_ = seed; }
  // Exchanges it with the device's.
  void swap();

 private:
  at::Generator generator_;
  at::Tensor state_;
  std::optional<std::uint64_t> seed_;  // in the state's place: of numbers that begin anew
};

}  // namespace lamina::devices
