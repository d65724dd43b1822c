// SPDX-License-Identifier: Apache-2.0
// States, under mutex_: waits for a call --ask()--> asked --run()--> cut, or failed --end()--> ended.
//
// Threads: bodies ask and wait, each with the compute slot, which nobody else needs meanwhile; the one that entered the
// step runs the cut and ends. Locks: mutex_, under which nothing else is taken.
#include "lamina/pipeline/first_call.h"

#include "lamina/base/error.h"
#include "lamina/runtime/execution_context.h"

namespace lamina::pipeline {

void FirstCall::ask(Cut cut) {
  auto* const context = runtime::ExecutionContext::current();
  if (context == nullptr) {
    throw base::UsageError(
        "the model was called in a thread of its own in its first step: call it in the thread that runs the step's "
        "body",
        base::Code{"step-outside"});
  }
  if (over()) return;
  context->lend_state([&] {
    tell(std::move(cut));  // not before: whoever runs it computes with the state that is lent
    std::unique_lock lock(mutex_);
    base::wait_until(
        lock, changed_, patience_, [&] { return cut_ran_ || ended_; },
        [] { return std::string("the cut of the model, which its first call waits for"); });
  });
  std::lock_guard guard(mutex_);
  if (!cut_ran_) throw base::CancelledError("the model was not cut");
}

bool FirstCall::over() {
  std::lock_guard guard(mutex_);
  return cut_ran_;
}

void FirstCall::tell(Cut cut) {
  {
    std::lock_guard guard(mutex_);
    if (!cut_) cut_ = std::move(cut);
  }
  step_.wake();
}

bool FirstCall::asked() {
  std::lock_guard guard(mutex_);
  return cut_ != nullptr;
}

void FirstCall::run() {
  cut_();
  std::lock_guard guard(mutex_);
  cut_ran_ = true;
  changed_.notify_all();
}

void FirstCall::end() {
  std::lock_guard guard(mutex_);
  ended_ = true;
  changed_.notify_all();
}

}  // namespace lamina::pipeline
