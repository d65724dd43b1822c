// SPDX-License-Identifier: Apache-2.0
#include "lamina/verification/plain_run.h"

namespace lamina::verification {

PlainRun::PlainRun(const std::vector<std::string>& modules, std::int64_t copy, std::int64_t step)
    : recorder_(std::make_shared<RunRecorder>(
          RecordingOptions{.folder = "", .steps = step + 1, .first = step, .one_microbatch = true},
          digests::RankRecording{.copy = copy})) {
  hooks_.add(recorder_, modules);
  hooks_.number(modules);
}

std::unique_ptr<model::HookedCall> PlainRun::begin(std::int64_t module, std::span<const at::Tensor> inputs) const {
  return hooks_.begin(base::ModuleId(module), /*remote=*/false, inputs);
}

digests::RankRecording PlainRun::recording() const {
  using digests::RecordedKind;
  auto recording = digests::read_text(recorder_->text());
  std::erase_if(recording.seen, [this](const auto& seen) {
    const bool is_left_out = seen.kind == RecordedKind::kGradient && left_out_.contains(seen.name);
    return is_left_out ||
           (without_gradients_ && (seen.kind == RecordedKind::kOutputGradient || seen.kind == RecordedKind::kGradient));
  });
  return recording;
}

}  // namespace lamina::verification
