// SPDX-License-Identifier: Apache-2.0
#include "lamina/runtime/thread_state.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/copies.h"
#include "lamina/device/streams.h"
#include "lamina/runtime/autocast.h"
#include "lamina/runtime/backward_here.h"

namespace lamina::runtime {
namespace {

thread_local std::int64_t modes_of_step = 0;  // torch function modes that this thread has from the one that entered it

std::int64_t function_modes() { return at::impl::PythonTorchFunctionTLS::stack_len(); }

class Captured : public ThreadState {
 public:
  explicit Captured(WorkerPool::Hooks::RunInContext run_in_context) : run_in_context_(std::move(run_in_context)) {}

  void run(const std::function<void()>& work) const override {
    const c10::OptionalStreamGuard on_stream(stream_);
    at::ThreadLocalStateGuard guard(state_);
    const BackwardHere backward_here;
    modes_of_step = function_modes();
    run_with_autocast(autocast_, [&] { run_in_context_ ? run_in_context_(work) : work(); });
  }

 private:
  const WorkerPool::Hooks::RunInContext run_in_context_;
  const at::ThreadLocalState state_;
  const std::optional<c10::Stream> stream_ = devices::current_stream();
  const std::string autocast_ = capture_autocast();
};

}  // namespace

std::shared_ptr<const ThreadState> ThreadState::capture(const WorkerPool::Hooks& face) {
  devices::compute_on_this_stream();
  return std::make_shared<Captured>(face.capture_context ? face.capture_context() : nullptr);
}

void check_modes_travel(const std::string& module) {
  if (function_modes() == modes_of_step) return;
  const auto text = base::str(
      "a call of ", module,
      ", which lives on another rank, inside a torch function mode such as `with torch.device(...)`: it would "
      "not hold there; enter it around the step function on every rank, or inside the module");
  throw base::UsageError(text, base::Code{"step-transform"});
}

}  // namespace lamina::runtime
