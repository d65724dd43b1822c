// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/process_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <mutex>
#include <utility>

namespace lamina::runtime {
namespace {

at::CPUGeneratorImpl& generator() {
  return *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

}  // namespace

void set_default_dtype(at::ScalarType dtype) {
  if (dtype != c10::get_default_dtype_as_scalartype()) c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
}

ProcessState ProcessState::current() {
  auto& process = generator();
  std::lock_guard guard(process.mutex_);
  ProcessState state(process.engine());
  state.next_float_normal_ = process.next_float_normal_sample();
  state.next_double_normal_ = process.next_double_normal_sample();
  state.of_device_ = devices::GeneratorState::current();
  state.default_dtype_ = c10::get_default_dtype_as_scalartype();
  return state;
}

void ProcessState::seed(std::uint64_t seed) {
  engine_ = at::mt19937(seed);
  next_float_normal_.reset();
  next_double_normal_.reset();
  of_device_.seed(seed);
}

void ProcessState::swap() {
  swap_generators();
  const auto dtype = std::exchange(default_dtype_, c10::get_default_dtype_as_scalartype());
  set_default_dtype(dtype);
}

void ProcessState::swap_generators() {
  of_device_.swap();
  auto& process = generator();
  std::lock_guard guard(process.mutex_);
  auto engine = process.engine();
  process.set_engine(engine_);
  engine_ = engine;
  const auto next_float = std::exchange(next_float_normal_, process.next_float_normal_sample());
  const auto next_double = std::exchange(next_double_normal_, process.next_double_normal_sample());
  process.set_next_float_normal_sample(next_float);
  process.set_next_double_normal_sample(next_double);
}

}  // namespace lamina::runtime
