// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/record_function.h>

#include <chrono>
#include <memory>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include "lamina/base/own_clock.h"
#include "lamina/frontend/calls.h"
#include "lamina/frontend/module_tree.h"
#include "lamina/frontend/tensor_makers.h"
#include "lamina/model/plan.h"

namespace lamina::frontend {

using model::Cost;

// One run of a model in this thread, while it lives: what happens belongs to the innermost node that runs.
class Recording : public Router {
 public:
  explicit Recording(const TorchModuleTree& tree);
  ~Recording() override;

  std::vector<Cost> finish();

  std::optional<ModulePlace> find(const torch::nn::Module* module) override;
  value::Value call(base::ModuleId, std::int64_t, value::Value) override { return {}; }  // nothing is elsewhere
  std::unique_ptr<Scope> enter(base::ModuleId id) override;
  void returned(int node, const value::Value& result);

 private:
  struct Popped;
  void push(int node);
  void pop();
  double pass_time();  // microseconds since the last time
  void begin_stretch();
  void hand_on();
  void read(const at::Tensor& tensor);
  void note_inputs(const at::RecordFunction& operation);
  void note_outputs(const at::RecordFunction& operation);
  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& operation);
  static void ends(const at::RecordFunction& operation, at::ObserverContext*);

  const TorchModuleTree& tree_;
  std::vector<Cost> costs_;
  Router* const outer_;
  const at::CallbackHandle handle_;
  std::vector<int> stack_;
  base::OwnClock clock_;
  std::chrono::nanoseconds since_{};
  int calls_ = 0;
  int stretches_ = 0;
  bool in_stretch_ = false;        // else the innermost node has done nothing since a call of it ended
  std::int64_t latest_bytes_ = 0;  // of what the latest operation or module returned
  int depth_ = 0;                  // operations in operations
  bool of_weights_ = false;        // the outermost operation has a parameter as a factor
  TensorMakers makers_;
  std::set<std::pair<const void*, std::int64_t>> read_;  // memory, offset: what the stretch has read
  std::unordered_set<const void*> counted_;              // memory that the outermost operation got or made
};

}  // namespace lamina::frontend
