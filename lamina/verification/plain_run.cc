// SPDX-License-Identifier: Apache-2.0
#include "lamina/verification/plain_run.h"

namespace lamina::verification {

PlainRun::PlainRun(const std::vector<std::string>& modules)
    : recorder_(std::make_shared<RunRecorder>(Terms{.folder = "", .steps = 1, .one_microbatch = true},
                                              digests::RankRecording())) {
  hooks_.add(recorder_, modules);
  hooks_.number(modules);
}

std::unique_ptr<model::HookedCall> PlainRun::begin(std::int64_t module, std::span<const at::Tensor> inputs) const {
  return hooks_.begin(base::ModuleId(module), /*remote=*/false, inputs);
}

digests::RankRecording PlainRun::recording() const {
  auto recording = digests::read_text(recorder_->text());
  if (without_gradients_) {
    std::erase_if(recording.seen, [](const auto& seen) { return seen.kind == digests::Kind::kOutputGradient; });
  }
  return recording;
}

}  // namespace lamina::verification
