// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lamina/model/modules.h"

namespace lamina::model {

// A call of a module on the rank that runs it.
struct ModuleCall {
  base::ModuleId module;
  std::string name;         // of the module
  bool remote = false;      // it came from another rank
  std::int64_t number = 0;  // of all calls that have hooks, the same for all hooks of this one
};

// Work of a subsystem around each call of a module on its owner, in the thread that runs it. Whatever a before_ has
// begun its after_ ends, also where the call fails between them; calls of one module may be in one another. A backward
// runs from the first gradient of an output to the last operation of the call, or else ends with the backward that it
// is part of, or with its graph. A forward that is computed again for a backward is a call like any other.
class CallHook {
 public:
  virtual ~CallHook() = default;
  // Errors of these are the call's.
  virtual void before_forward(const ModuleCall&) {}
  virtual void after_forward(const ModuleCall&) {}
  virtual void before_backward(const ModuleCall&) {}
  virtual void after_backward(const ModuleCall&) {}

  // True where it is shown tensors: those that a call is given, before its forward, and those that it returns, after
  // it. Gradients of the latter follow, which may come anew when a graph is kept.
  virtual bool wants_tensors() const { return false; }
  virtual void see_inputs(const ModuleCall&, std::span<const at::Tensor>) {}
  virtual void see_outputs(const ModuleCall&, std::span<const at::Tensor>) {}
  virtual void see_gradient(const ModuleCall&, std::int64_t /*output*/, const at::Tensor& /*gradient*/) {}
};
using Hooks = std::vector<std::shared_ptr<CallHook>>;

// One call of a module that has hooks, from before its forward on.
class HookedCall {
 public:
  HookedCall(Hooks hooks, ModuleCall call, std::span<const at::Tensor> inputs = {});
  // Ends a forward that end() did not, because it failed.
  ~HookedCall();
  HookedCall(const HookedCall&) = delete;

  // The forward has returned these tensors: from now on their backward is the call's. Tensors that were not made in
  // this call, such as arguments that are handed on, are let be.
  void end(std::span<const at::Tensor> outputs);

 private:
  class Backward;
  const std::shared_ptr<Backward> backward_;
  bool over_ = false;
};

// [Note: call hooks] The hooks of a job, by module. They are added, by the names of modules, before the first step in
// which these are called. A call over a request passes here in the engine, by around(); a call that a face makes itself
// passes by the face, which asks begin() for modules that are has(). Where nothing was added nobody passes here: the
// engine has the face's own modules, and a face looks as if there were no hooks.
class CallHooks {
 public:
  void add(std::shared_ptr<CallHook> hook, std::vector<std::string> names);
  // Takes a hook away from all modules, between steps.
  void remove(const std::shared_ptr<CallHook>& hook);
  // The names of the model's modules, by their numbers. Throws base::UsageError where a module with hooks is not among
  // them.
  void number(const std::vector<std::string>& names);

  bool has(base::ModuleId module) const { return !by_module_.empty() && by_module_.contains(module.value); }
  // True where some are to be told what calls are given.
  bool want_tensors() const;
  // A call of a module that has hooks, given these tensors.
  std::unique_ptr<HookedCall> begin(base::ModuleId module, bool remote, std::span<const at::Tensor> inputs = {}) const;
  // One that only hooks which are shown tensors hear of, or only all others.
  std::unique_ptr<HookedCall> begin_for(bool shown, base::ModuleId module, bool remote,
                                        std::span<const at::Tensor> inputs = {}) const;

  // Calls one of `modules`, which may have hooks.
  value::Value call(Modules& modules, base::ModuleId module, const std::string& state, value::Value arguments,
                    bool remote) const;
  // Gives the modules as requests call them.
  std::shared_ptr<Modules> around(std::shared_ptr<Modules> modules) const;

 private:
  std::vector<std::pair<std::string, std::shared_ptr<CallHook>>> added_;
  std::unordered_map<std::int64_t, std::pair<std::string, Hooks>> by_module_;
  mutable std::atomic<std::int64_t> calls_ = 0;
};

}  // namespace lamina::model
