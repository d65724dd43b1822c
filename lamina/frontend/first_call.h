// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>

#include "lamina/base/wait.h"
#include "lamina/frontend/calls.h"
#include "lamina/frontend/tracer.h"
#include "lamina/pipeline/job.h"

namespace lamina::frontend {

// Stands between the bodies of the step in which the model is cut and the thread that entered it. A body waits at its
// first call of the model, or of a part of it, while that thread traces the call and cuts the model together with the
// other ranks; then it goes on, and nothing of it is repeated.
class FirstCall : public Router, public std::enable_shared_from_this<FirstCall> {
 public:
  // `cut` is called once, by serve(), with the call of the model; with none where a part of it is called first, or the
  // body ends without a call.
  using Cut = std::function<void(const std::optional<Example>&)>;
  FirstCall(Cut cut, base::Deadline::Clock::duration timeout) : cut_(std::move(cut)), patience_{timeout} {}

  // In a body's thread; throws base::UsageError in any other, and base::TimeoutError.
  void ask(std::optional<Example> example);
  pipeline::Job::Body around(pipeline::Job::Body body);

  // Called again and again by the thread that entered the step; throws what the cut throws.
  void serve();

  std::optional<Place> find(const torch::nn::Module* module) override;
  value::Value call(base::ModuleId, std::int64_t, value::Value) override { return {}; }
  std::unique_ptr<Scope> enter(base::ModuleId) override { return nullptr; }

 private:
  bool pending();

  const Cut cut_;
  const base::Patience patience_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool asked_ = false, answered_ = false, failed_ = false;
  std::optional<Example> example_;
};

}  // namespace lamina::frontend
