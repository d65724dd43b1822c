// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "lamina/module/modules.h"
#include "lamina/pipeline/activity.h"
#include "lamina/pipeline/graph.h"
#include "lamina/transport/transport.h"

namespace lamina::pipeline {

// The owner's side: runs what other ranks ask for, keeps the graph of each call until its backward has run or the step
// ends, and answers. One thread per request calls serve(), under the step's ambient state.
class ExecutionServer {
 public:
  ExecutionServer(transport::Transport& transport, ComputeSlot& slot, module::Failures& failures)
      : transport_(transport), slot_(slot), failures_(failures) {}

  void set_modules(std::shared_ptr<module::Modules> modules) { modules_ = std::move(modules); }

  // Answers a kForward or kBackward request, if with the error it met. Throws base::CancelledError when the step ended
  // meanwhile, base::PeerError when the caller is gone.
  void serve(transport::Message&& request);

  void end_step();  // forgets every call

 private:
  value::Value forward(transport::Message& request);
  value::Value backward(const transport::Message& request);

  transport::Transport& transport_;
  ComputeSlot& slot_;
  module::Failures& failures_;
  std::shared_ptr<module::Modules> modules_;
  std::mutex mutex_;
  std::map<base::CallId, std::shared_ptr<CalleeGraph>> graphs_;  // by the forward's call
};

}  // namespace lamina::pipeline
