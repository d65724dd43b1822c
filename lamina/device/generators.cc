// SPDX-License-Identifier: Apache-2.0
#include "lamina/device/generators.h"

#include <cstring>
#include <mutex>
#include <utility>

#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"

namespace lamina::devices {

at::Generator rank_generator() {
  const auto device = rank_device();
  return is_host(device) ? at::Generator() : generator(device);
}

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard guard(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard guard(generator.mutex());
  generator.set_state(state);
}

bool takes_state(const at::Generator& generator, const at::Tensor& state) {
  try {
    generator.clone().set_state(state);
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

bool has_drawn_since(std::uint64_t seed) {
  auto generator = rank_generator();
  if (!generator.defined()) return false;
  const std::lock_guard guard(generator.mutex());
  if (generator.current_seed() != seed) return false;
  const auto now = generator.get_state();
  generator.set_current_seed(seed);
  const auto fresh = generator.get_state();
  generator.set_state(now);
  return std::memcmp(now.const_data_ptr(), fresh.const_data_ptr(), now.nbytes()) != 0;
}

GeneratorState GeneratorState::current() {
  GeneratorState state;
  state.generator_ = rank_generator();
  if (state.generator_.defined()) state.state_ = state_of(state.generator_);
  return state;
}

void GeneratorState::swap() {
  if (!generator_.defined()) return;
  const std::lock_guard guard(generator_.mutex());
  const auto now = generator_.get_state();
  seed_ ? generator_.set_current_seed(*seed_) : generator_.set_state(state_);
  seed_.reset();
  state_ = now;
}

}  // namespace lamina::devices
