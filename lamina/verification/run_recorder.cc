// SPDX-License-Identifier: Apache-2.0
#include "lamina/verification/run_recorder.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/autograd/graph_task.h>

#include <unistd.h>

#include <algorithm>
#include <ranges>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/generators.h"
#include "lamina/device/rank_device.h"
#include "lamina/digests/variables.h"
#include "lamina/runtime/execution_context.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::verification {

using digests::RecordedKind;

namespace {

// The microbatch whose work this thread does; `outside` where none of the engine's says so.
std::int64_t current_microbatch(std::int64_t outside) {
  const auto* context = runtime::ExecutionContext::current();
  return context != nullptr ? context->microbatch().value : outside;
}

// By which the calls that now begin are counted: their microbatch. A part that a checkpoint runs again in the backward
// may be run elsewhere, or not at all, in another layout: such calls are counted apart, -1, -2, ...
std::int64_t counted_with(std::int64_t microbatch) {
  return torch::autograd::get_current_graph_task_id() >= 0 ? ~microbatch : microbatch;
}

std::int64_t numbered(std::int64_t counted, std::int64_t count) { return counted < 0 ? ~count : count; }

// Tensors of which torch knows no elements in order: those of classes with operations of their own, nested ones, and
// those in functions that torch transforms.
constexpr c10::DispatchKeySet kWithoutOrder({c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                             c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize,
                                             c10::DispatchKey::ZeroTensor});

bool has_value(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() && !value::is_pending(tensor) && !tensor.is_nested() &&
         !tensor.key_set().has_any(kWithoutOrder) && digest_can_be_made(tensor.scalar_type());
}

// A hash of where the random numbers of this thread are: of the place in a block of them, and of its first ones; and of
// the state of the device's.
std::uint64_t generators() {
  const auto generator = at::detail::getDefaultCPUGenerator();
  auto* const state = at::check_generator<at::CPUGeneratorImpl>(generator);
  const auto engine = state->engine().data();
  std::uint64_t hash = engine.seed_;
  const auto add = [&hash](std::uint64_t word) { hash = (hash ^ word) * 0x9e3779b97f4a7c15 + (hash >> 29); };
  add(static_cast<std::uint64_t>(engine.left_));
  add(engine.next_);
  add(static_cast<std::uint64_t>(state->next_float_normal_sample().has_value()));
  add(static_cast<std::uint64_t>(state->next_double_normal_sample().has_value()));
  for (const auto word : {engine.state_[0], engine.state_[1]}) add(word);
  if (const auto device = devices::rank_generator(); device.defined()) {
    const auto bytes = devices::state_of(device);
    for (const auto byte : std::span(bytes.const_data_ptr<std::uint8_t>(), bytes.nbytes())) add(byte);
  }
  return hash;
}

std::string modes() {
  std::string text = at::GradMode::is_enabled() ? "gradients" : "no gradients";
  if (c10::InferenceMode::is_enabled()) text += ", inference mode";
  if (const auto type = devices::rank_device().type(); at::autocast::is_autocast_enabled(type)) {
    text += base::str(", autocast to ", c10::toString(at::autocast::get_autocast_dtype(type)));
  }
  return base::str(text, ", default ", c10::toString(c10::get_default_dtype_as_scalartype()));
}

}  // namespace

std::optional<RecordingOptions> read_terms(const environment::Environment& environment) {
  const auto folder = environment(digests::kFolderVariable);
  if (!folder) return {};
  RecordingOptions recording_options{.folder = *folder};
  if (const auto steps = environment(digests::kStepsVariable)) recording_options.steps = std::stoll(*steps);
  recording_options.bits = environment(digests::kBitsVariable).has_value();
  recording_options.layout = environment(digests::kLayoutVariable).value_or("");
  if (const auto names = environment(digests::kLookedAtVariable)) {
    for (const auto name : *names | std::views::split(','))
      recording_options.looked_at.emplace(name.begin(), name.end());
    if (names->empty()) recording_options.looked_at.insert("");  // the model
  }
  recording_options.collapsed = environment(digests::kCollapsedVariable).has_value();
  return recording_options;
}

RunRecorder::RunRecorder(RecordingOptions recording_options, digests::RankRecording about)
    : terms_(std::move(recording_options)),
      process_(::getpid()),
      writer_(writes() ? digests::Writer(terms_.folder, about) : digests::Writer(kept_, about)) {
  steps_ = writer_.steps_before() + terms_.first;
  seen_ = steps_.load();
  beginning_ = kept_.str();
}

RunRecorder::~RunRecorder() {
  try {
    end();
  } catch (const base::FileError&) {  // NOLINT(bugprone-empty-catch): the recording breaks off, which its reader tells
  }
}

std::int64_t RunRecorder::microbatch() const { return current_microbatch(microbatch_); }

void RunRecorder::end_step() {
  const std::lock_guard lock(mutex_);
  close_step();
}

void RunRecorder::end_step_of(const Recorded& recorded) {
  const std::lock_guard lock(mutex_);
  if (const auto parameters = std::exchange(parameters_, nullptr)) {
    for (const auto& [name, gradient] : parameters->take()) write_gradient(name, recorded(name, gradient));
  }
  close_step();
}

void RunRecorder::see_gradients(std::span<const ParameterGradients::Named> gradients) {
  const std::lock_guard lock(mutex_);
  for (const auto& [name, gradient] : gradients) write_gradient(name, gradient);
}

void RunRecorder::write_gradient(const std::string& name, const at::Tensor& gradient) {
  if (!has_value(gradient)) return;
  writer_.write({RecordedKind::kGradient, steps_, 0, name, 0, 0, order_++, digest_of(gradient, terms_.bits)});
}

void RunRecorder::begin_step_of(std::span<const ParameterGradients::Named> parameters) {
  const std::lock_guard lock(mutex_);
  forget();
  kept_ << beginning_;
  parameters_ =
      std::make_unique<ParameterGradients>(parameters, [this] { return ::getpid() == process_ && microbatch() == 0; });
}

std::string RunRecorder::text() {
  const std::lock_guard lock(mutex_);
  return kept_.str();
}

void RunRecorder::let_go() {
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  steps_ = terms_.steps;
  forget();
}

void RunRecorder::forget() {
  calls_ = {};
  calls_of_ = {};
  known_ = {};
  next_known_ = 0;
  gradients_of_model_ = {};
  parameters_.reset();
  kept_.str("");
}

void RunRecorder::close_step() {
  calls_.clear();
  calls_of_.clear();
  microbatch_ = 0;
  updates_ = 0;
  writer_.end_step(++steps_);
}

void RunRecorder::see_result(base::Microbatch microbatch, std::span<const at::Tensor> tensors) {
  const std::lock_guard lock(mutex_);
  for (std::int64_t i = 0; std::cmp_less(i, tensors.size()); ++i) {
    if (!has_value(tensors[i])) continue;
    writer_.write({RecordedKind::kResult, steps_, microbatch.value, "the step", 0, i, order_++,
                   digest_of(tensors[i], terms_.bits)});
  }
}

std::int64_t RunRecorder::step_of_update() const { return has_step_functions_ ? steps_ - 1 : steps_.load(); }

void RunRecorder::see_options(const std::string& parameter, const std::map<std::string, std::string>& options) {
  const std::lock_guard lock(mutex_);
  digests::Reads reads;
  reads.values = options;
  writer_.write({step_of_update(), -1, parameter, updates_}, reads);
}

void RunRecorder::see_update(std::span<const Held> gradients) {
  if (::getpid() != process_) return;
  const std::lock_guard lock(mutex_);
  const std::int64_t step = step_of_update();
  for (const auto& [name, gradient, part] : gradients) {
    if (!has_value(gradient)) continue;
    writer_.write(
        {RecordedKind::kGradient, step, -1, name, updates_, 0, order_++, digest_of(gradient, terms_.bits, part)});
  }
  ++updates_;
  if (!has_step_functions_ && !calls_.empty()) close_step();
}

void RunRecorder::see_state(std::span<const std::pair<RecordedKind, Held>> state) {
  if (::getpid() != process_) return;
  const std::lock_guard lock(mutex_);
  for (const auto& [kind, held] : state) {
    if (!has_value(held.tensor)) continue;
    writer_.write({kind, steps_ - 1, -1, held.name, 0, 0, order_++, digest_of(held.tensor, terms_.bits, held.part)});
  }
  seen_ = steps_.load();
}

void RunRecorder::keep(std::int64_t output, const at::Tensor& gradient) {
  if (std::cmp_greater_equal(output, gradients_of_model_.size())) gradients_of_model_.resize(output + 1);
  at::Tensor& kept = gradients_of_model_[output];
  kept = kept.defined() ? kept.add(gradient) : gradient.detach();
}

std::vector<at::Tensor> RunRecorder::gradients_of_model() {
  const std::lock_guard lock(mutex_);
  return std::exchange(gradients_of_model_, {});
}

void RunRecorder::end() {
  if (::getpid() != process_) return;
  const std::lock_guard lock(mutex_);
  if (!std::exchange(is_over_, true)) writer_.end();
}

void RunRecorder::before_forward(const model::ModuleCall& call) {
  if (::getpid() != process_) return;
  const std::int64_t microbatch = this->microbatch();
  if (terms_.one_microbatch && (microbatch > 0 || is_over())) return;
  const std::int64_t counted = counted_with(microbatch);
  const std::lock_guard lock(mutex_);
  const std::int64_t number = numbered(counted, calls_of_[{counted, call.name}]++);
  calls_[call.number] = {{steps_, microbatch, call.name, number}, {modes(), generators(), false}, order_++, {}};
}

void RunRecorder::see_reads(const std::string& module, std::span<const Variable> variables) {
  const std::int64_t microbatch = this->microbatch();
  const std::int64_t counted = counted_with(microbatch);
  const std::lock_guard lock(mutex_);
  const auto calls = calls_of_.find({counted, module});
  if (calls == calls_of_.end()) return;
  digests::Reads reads;
  for (const auto& [name, value, tensors, user] : variables) {
    reads.values[name] = value;
    if (!user.empty()) reads.users[name] = user;
    for (const auto& tensor : tensors) {
      if (has_value(tensor)) reads.tensors[name].push_back(digest_of(tensor, /*bits=*/false));
    }
  }
  writer_.write({steps_, microbatch, module, numbered(counted, calls->second - 1)}, reads);
}

void RunRecorder::after_forward(const model::ModuleCall& call) {
  if (::getpid() != process_) return;
  const std::lock_guard lock(mutex_);
  Call* const ended = begun(call);
  if (ended == nullptr) return;
  ended->surroundings.drew = ended->surroundings.generator != generators();
  writer_.write(ended->name, ended->surroundings);
}

RunRecorder::Call* RunRecorder::begun(const model::ModuleCall& call) {
  const auto found = calls_.find(call.number);
  return found == calls_.end() ? nullptr : &found->second;
}

void RunRecorder::write(RecordedKind kind, const digests::CallName& call, std::int64_t index, std::int64_t order,
                        const at::Tensor& tensor) {
  if (!has_value(tensor)) return;
  const auto& [step, microbatch, name, number] = call;
  writer_.write({kind, step, microbatch, name, number, index, order, digest(tensor)});
}

digests::Digest RunRecorder::digest(const at::Tensor& tensor) {
  constexpr std::size_t kMost = 16;
  if (!tensor.has_storage() || tensor.is_inference() || tensor.is_conj() || tensor.is_neg()) {
    return digest_of(tensor, terms_.bits);  // the first two have no version
  }
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto version = static_cast<std::int64_t>(tensor._version());
  const auto is_it = [&](const Known& known) {
    return known.storage._unsafe_get_target() == storage && !known.storage.expired() && known.version == version &&
           known.offset == tensor.storage_offset() && tensor.sizes() == known.digest.shape &&
           tensor.strides() == known.strides && known.type == tensor.scalar_type();
  };
  const auto found = std::ranges::find_if(known_, is_it);
  if (found != known_.end()) return found->digest;
  Known known{tensor.storage().getWeakStorageImpl(),
              tensor.scalar_type(),
              tensor.storage_offset(),
              tensor.strides().vec(),
              version,
              digest_of(tensor, terms_.bits)};
  if (known_.size() < kMost) return known_.emplace_back(std::move(known)).digest;
  next_known_ = (next_known_ + 1) % kMost;
  return (known_[next_known_] = std::move(known)).digest;
}

void RunRecorder::see_inputs(const model::ModuleCall& call, std::span<const at::Tensor> inputs) {
  if (::getpid() != process_) return;
  const std::lock_guard lock(mutex_);
  Call* const known = begun(call);
  if (known == nullptr) return;
  for (std::int64_t i = 0; std::cmp_less(i, inputs.size()); ++i) {
    if (inputs[i].defined() && value::is_pending(inputs[i])) {
      known->awaited.resize(inputs.size());
      known->awaited[i] = {inputs[i], value::version_of(inputs[i])};
    } else {
      write(RecordedKind::kInput, known->name, i, known->began, inputs[i]);
    }
  }
}

void RunRecorder::see_outputs(const model::ModuleCall& call, std::span<const at::Tensor> outputs) {
  if (::getpid() != process_) return;
  const std::lock_guard lock(mutex_);
  Call* const known = begun(call);
  if (known == nullptr) return;
  const auto awaited = std::exchange(known->awaited, {});
  for (std::int64_t i = 0; std::cmp_less(i, awaited.size()); ++i) {
    const auto& [input, version] = awaited[i];
    if (!input.defined() || input.is_inference()) continue;  // of the latter nobody counts the writes
    // One that the module has written is no longer as it came.
    if (value::version_of(input) == version) write(RecordedKind::kInput, known->name, i, known->began, input);
  }
  for (std::int64_t i = 0; std::cmp_less(i, outputs.size()); ++i) {
    write(RecordedKind::kOutput, known->name, i, order_++, outputs[i]);
  }
}

void RunRecorder::see_gradient(const model::ModuleCall& call, std::int64_t output, const at::Tensor& gradient) {
  if (::getpid() != process_) return;
  const std::lock_guard lock(mutex_);
  const Call* const known = begun(call);
  if (known == nullptr) return;
  write(RecordedKind::kOutputGradient, known->name, output, order_++, gradient);
  if (terms_.one_microbatch && known->name == digests::CallName{steps_, 0, "", 0}) keep(output, gradient);
}

}  // namespace lamina::verification
