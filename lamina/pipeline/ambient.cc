// SPDX-License-Identifier: Apache-2.0
#include "lamina/pipeline/ambient.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/AutogradState.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "lamina/base/error.h"
#include "lamina/pipeline/autocast.h"

namespace lamina::pipeline {
namespace {

class Captured : public Ambient {
 public:
  void run(const std::function<void()>& work) const override {
    at::ThreadLocalStateGuard guard(state_);
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
    run_with_autocast(autocast_, work);
  }

 private:
  const at::ThreadLocalState state_;
  const std::string autocast_ = capture_autocast();
};

}  // namespace

std::shared_ptr<const Ambient> Ambient::capture() { return std::make_shared<Captured>(); }

std::string capture_modes() {
  const std::string modes = {static_cast<char>(at::GradMode::is_enabled()),
                             static_cast<char>(c10::InferenceMode::is_enabled())};
  return modes + capture_autocast();
}

void run_with_modes(std::string_view modes, const std::function<void()>& work) {
  if (modes.size() < 2) throw base::FormatError("a call's modes are malformed");
  c10::InferenceMode inference(modes[1] != 0);
  at::AutoGradMode grad(modes[0] != 0);
  run_with_autocast(modes.substr(2), work);
}

}  // namespace lamina::pipeline
