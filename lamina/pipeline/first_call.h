// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>

#include "lamina/base/wait.h"
#include "lamina/runtime/step_context.h"

namespace lamina::pipeline {

// [Note: first call] In the step that cuts the model a body waits at its first call of the model, or of a part of it.
// Meanwhile the thread that entered the step traces that call, and cuts the model together with the other ranks. Then
// it goes on with a model whose calls are routed, and nothing of it is repeated. The first body that asks says what is
// traced.
class FirstCall {
 public:
  using Cut = std::function<void()>;

  // Each wait ends after `timeout`.
  FirstCall(runtime::StepContext& step, base::Clock::duration timeout) : step_(step), patience_{timeout} {}

  // In a body's thread: has `cut` run, unless another one is, and waits until the model is cut. Throws base::UsageError
  // in another thread, base::CancelledError where the cut has failed, and base::TimeoutError.
  void ask(Cut cut);

  // In the thread that entered the step: whether somebody has asked; runs the cut, and throws what that throws; lets go
  // whoever waits, once that is the step's error.
  bool asked();
  void run();
  void end();

 private:
  bool over();  // the cut has run
  void tell(Cut cut);

  runtime::StepContext& step_;
  const base::Patience patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Cut cut_;
  bool cut_ran_ = false, ended_ = false;
};

}  // namespace lamina::pipeline
