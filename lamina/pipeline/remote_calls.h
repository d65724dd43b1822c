// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "lamina/base/wait.h"
#include "lamina/module/modules.h"
#include "lamina/pipeline/activity.h"
#include "lamina/pipeline/graph.h"
#include "lamina/transport/transport.h"

namespace lamina::pipeline {

class RemoteCalls;

// A question sent to another rank whose answer is on its way.
class PendingResult {
 public:
  // Gives the compute slot up until the answer is there, then goes on as `phase`. Throws value::RemoteFailure when the
  // other rank raised, base::CancelledError when the step ended, base::TimeoutError.
  value::Value wait(plan::Phase phase);

 private:
  friend class RemoteCalls;
  struct Slot {
    base::Rank asked;
    std::string what;  // "forward of h.5 on rank 1 (step 3, microbatch 2)"
    std::condition_variable arrived;
    std::optional<transport::Message> answer;
  };
  PendingResult(RemoteCalls& calls, base::CallId id, std::shared_ptr<Slot> slot)
      : calls_(calls), id_(id), slot_(std::move(slot)) {}

  RemoteCalls& calls_;
  const base::CallId id_;
  const std::shared_ptr<Slot> slot_;
};

// The caller's side: calls of modules that live on other ranks.
class RemoteCalls {
 public:
  RemoteCalls(transport::Transport& transport, base::Deadline::Clock::duration timeout);

  // Calls module `id` of `owner` from the current activity. The result's tensors carry gradients back to the owner.
  value::Value call(base::Rank owner, base::ModuleId id, module::Modules& modules, value::Value arguments);

  void begin_step();
  void cancel();                              // from any thread: every wait ends with base::CancelledError
  void deliver(transport::Message&& answer);  // from the transport's thread

  // What this rank waits for from `rank`; "" for nothing.
  std::string awaited_from(base::Rank rank);

 private:
  friend class PendingResult;

  PendingResult start(base::Rank to, transport::Message request, std::string what);
  Tensors backward(base::Rank owner, base::CallId forward, const std::string& name, const Tensors& gradients,
                   bool keep_graph);

  transport::Transport& transport_;
  const base::Patience patience_;
  std::mutex mutex_;
  std::map<base::CallId, std::shared_ptr<PendingResult::Slot>> pending_;
  std::map<base::Microbatch, std::int64_t> counters_;
  bool cancelled_ = false;
  // Expires with this: a graph that the user keeps may outlive the job.
  const std::shared_ptr<const bool> alive_ = std::make_shared<bool>(true);
  std::atomic<bool> told_ = false;  // that a wait of this step is long: once, since all its microbatches wait alike
};

}  // namespace lamina::pipeline
