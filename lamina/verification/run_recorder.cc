// SPDX-License-Identifier: Apache-2.0
#include "lamina/verification/run_recorder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>

#include <utility>

#include "lamina/base/str.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::verification {

using digests::Kind;

namespace {

bool has_value(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() && !value::is_pending(tensor) &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

// Where the random numbers of this thread's context are.
std::uint64_t generator() {
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  return digest_of(state, /*bits=*/true).bits;
}

std::string modes() {
  std::string text = at::GradMode::is_enabled() ? "gradients" : "no gradients";
  if (c10::InferenceMode::is_enabled()) text += ", inference mode";
  if (at::autocast::is_autocast_enabled(at::kCPU)) {
    text += base::str(", autocast to ", c10::toString(at::autocast::get_autocast_dtype(at::kCPU)));
  }
  return base::str(text, ", default ", c10::toString(c10::get_default_dtype_as_scalartype()));
}

}  // namespace

std::optional<Terms> read_terms(const environment::Environment& environment) {
  const auto folder = environment.find(kFolderVariable);
  if (!folder) return {};
  Terms terms{.folder = *folder};
  if (const auto steps = environment.find(kStepsVariable)) terms.steps = std::stoll(*steps);
  terms.bits = environment.find(kBitsVariable).has_value();
  terms.collapsed = environment.find(kCollapsedVariable).has_value();
  return terms;
}

RunRecorder::RunRecorder(Terms terms, digests::RankRecording about)
    : terms_(std::move(terms)), writer_(terms_.folder, about) {}

RunRecorder::~RunRecorder() { writer_.end(); }

void RunRecorder::end_step() {
  const std::lock_guard lock(mutex_);
  calls_.clear();
  calls_of_.clear();
  microbatch_ = 0;
  writer_.end_step(++steps_);
}

void RunRecorder::see_result(base::Microbatch microbatch, std::span<const at::Tensor> tensors) {
  const std::lock_guard lock(mutex_);
  for (std::int64_t i = 0; std::cmp_less(i, tensors.size()); ++i) {
    if (!has_value(tensors[i])) continue;
    writer_.write(
        {Kind::kResult, steps_, microbatch.value, "the step", 0, i, order_++, digest_of(tensors[i], terms_.bits)});
  }
}

void RunRecorder::see(Kind kind, const std::string& name, const at::Tensor& tensor, const PartOf& part) {
  const std::lock_guard lock(mutex_);
  if (!has_value(tensor)) return;
  const std::int64_t step = kind == Kind::kGradient ? steps_.load() : steps_ - 1;
  writer_.write({kind, step, -1, name, 0, 0, order_++, digest_of(tensor, terms_.bits, part)});
}

void RunRecorder::before_forward(const model::ModuleCall& call) {
  const auto* context = runtime::ExecutionContext::current();
  const std::int64_t microbatch = context != nullptr ? context->microbatch().value : microbatch_.load();
  const std::lock_guard lock(mutex_);
  const std::int64_t number = calls_of_[{microbatch, call.name}]++;
  calls_[call.number] = {{steps_, microbatch, call.name, number}, {modes(), generator(), false}, order_++};
}

void RunRecorder::after_forward(const model::ModuleCall& call) {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(call.number);
  if (found == calls_.end()) return;
  auto& [name, surroundings, began] = found->second;
  surroundings.drew = surroundings.generator != generator();
  writer_.write(name, surroundings);
}

RunRecorder::Call RunRecorder::begun(const model::ModuleCall& call) {
  const auto found = calls_.find(call.number);
  return found == calls_.end() ? Call{{-1, -1, "", -1}, {}, 0} : found->second;
}

void RunRecorder::write(Kind kind, const digests::CallName& call, std::int64_t index, std::int64_t order,
                        const at::Tensor& tensor) {
  const auto& [step, microbatch, name, number] = call;
  if (step < 0 || !has_value(tensor)) return;
  writer_.write({kind, step, microbatch, name, number, index, order, digest_of(tensor, terms_.bits)});
}

void RunRecorder::see_inputs(const model::ModuleCall& call, std::span<const at::Tensor> inputs) {
  const std::lock_guard lock(mutex_);
  const auto [name, surroundings, began] = begun(call);
  for (std::int64_t i = 0; std::cmp_less(i, inputs.size()); ++i) write(Kind::kInput, name, i, began, inputs[i]);
}

void RunRecorder::see_outputs(const model::ModuleCall& call, std::span<const at::Tensor> outputs) {
  const std::lock_guard lock(mutex_);
  const auto name = begun(call).name;
  for (std::int64_t i = 0; std::cmp_less(i, outputs.size()); ++i) write(Kind::kOutput, name, i, order_++, outputs[i]);
}

void RunRecorder::see_gradient(const model::ModuleCall& call, std::int64_t output, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  write(Kind::kOutputGradient, begun(call).name, output, order_++, gradient);
}

}  // namespace lamina::verification
