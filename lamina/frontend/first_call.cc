// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/first_call.h"

#include "lamina/base/error.h"
#include "lamina/runtime/activity.h"

namespace lamina::frontend {

void FirstCall::ask(std::optional<Example> example) {
  auto* const activity = runtime::Activity::current();
  if (activity == nullptr) {
    throw base::UsageError(
        "the model was called in a thread of its own in its first step: call it in the thread that runs the step's "
        "body");
  }
  std::unique_lock lock(mutex_);
  if (!asked_) {
    asked_ = true;
    example_ = std::move(example);
  }
  lock.unlock();
  activity->lend_state([&] {
    std::unique_lock waiting(mutex_);
    base::wait_until(
        waiting, changed_, patience_, [&] { return answered_; },
        [] { return std::string("the cut of the model, which its first call waits for"); });
  });
  if (failed_) throw base::CancelledError("the model was not cut");
}

pipeline::Job::Body FirstCall::around(pipeline::Job::Body body) {
  return [self = shared_from_this(), body = std::move(body)](base::Microbatch microbatch) {
    value::Value output;
    try {
      output = body(microbatch);
    } catch (...) {
      if (self->pending()) self->ask(std::nullopt);
      throw;
    }
    if (self->pending()) self->ask(std::nullopt);
    return output;
  };
}

bool FirstCall::pending() {
  std::lock_guard guard(mutex_);
  return !answered_;
}

void FirstCall::serve() {
  {
    std::lock_guard guard(mutex_);
    if (!asked_ || answered_) return;
    if (failed_) {  // by now it is the step's error
      answered_ = true;
      changed_.notify_all();
      return;
    }
  }
  try {
    cut_(example_);
  } catch (...) {
    failed_ = true;
    throw;
  }
  std::lock_guard guard(mutex_);
  answered_ = true;
  changed_.notify_all();
}

std::optional<Place> FirstCall::find(const torch::nn::Module* module) {
  ask(std::nullopt);
  Router* const next = router();
  return next == nullptr || next == this ? std::nullopt : next->find(module);
}

}  // namespace lamina::frontend
