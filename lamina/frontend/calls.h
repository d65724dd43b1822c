// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "lamina/base/ids.h"
#include "lamina/value/value.h"

namespace torch::nn {
class Module;
}

// Calls of a Child, from where they are made to where they run.
namespace lamina::frontend {

// [Note: call kinds] A module's forward may be overloaded, a template, or have default arguments. So what travels with
// a remote call is which of them the caller's compiler chose: a number made of the types of module and arguments.
// Every rank runs the same program, so every rank knows it, whether it makes that call or not.
using Invoke = value::Value (*)(torch::nn::Module& module, value::Value arguments);

// Makes `invoke` known under the number of `type`, the mangled name of its types; returns the number.
std::int64_t add_call_kind(const char* type, Invoke invoke);

// Throws base::UsageError for a number that this program does not know, or that stands for two kinds.
Invoke call_kind(std::int64_t number);

// A forward in the place of a module's own, which takes one tensor and gives one. Where this rank has a part of what is
// given, returned, or its gradient, the others give the whole of it: collective over these, for who looks on.
struct Forward {
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  Function call;
  Function whole_input = {}, whole_output = {}, whole_gradient = {};  // empty where these are whole
};

// A module as callers know it: only modules that are called as a Child can be owned.
struct RegisteredChild {
  std::weak_ptr<torch::nn::Module> module;
  std::optional<int> partition;  // by set_partition
  std::optional<int> scope;      // by the Partition around it, which counts without auto_partition only
  bool dynamic = false;
  Forward forward = {};  // in the place of its own
};
void register_child(const std::shared_ptr<torch::nn::Module>& module, std::optional<int> scope);
const RegisteredChild* find_child(const torch::nn::Module* module);  // nullptr for what is no Child
// For modules that are a Child; both throw base::UsageError for any other.
void place(const torch::nn::Module* module, int partition);
void vary(const torch::nn::Module* module);

// From now on calls of the module as a Child make this one. Throws base::UsageError for a module that is no Child.
void replace_forward(const torch::nn::Module* module, Forward forward);
const Forward* replaced_forward(const torch::nn::Module* module);  // nullptr: it has its own

class Router;

// The target of a call.
struct ModulePlace {
  Router* router;
  base::ModuleId id;
  bool elsewhere;         // else it runs here, in the scope that enter() returns
  bool anywhere = false;  // it runs where an argument lies that is not here
  // It may write buffers: nothing is to come between what it reads of them and what it writes, as a wait for an
  // argument would.
  bool writes = false;
};

// Stands between the calls of Child modules and the modules. There is one at most.
class Router {
 public:
  virtual ~Router() = default;
  // Finds the target of a call of `module`; nothing where it is not this router's business.
  virtual std::optional<ModulePlace> find(const torch::nn::Module* module) = 0;
  virtual value::Value call(base::ModuleId id, std::int64_t kind, value::Value arguments) = 0;

  // State kept while a call runs here.
  struct Scope {
    virtual ~Scope() = default;
    virtual bool wants_arguments() const { return false; }
    virtual void given(const value::Value&) {}
    virtual bool wants_result() const { return false; }
    virtual void returned(const value::Value&) {}
  };
  virtual std::unique_ptr<Scope> enter(base::ModuleId id) = 0;  // may be nullptr
};

// True of an argument that stands for a value of another rank.
bool lies_elsewhere(const at::Tensor& tensor);
template <class T>
bool lies_elsewhere(const T&) {
  return false;
}

// Has the value be here.
void fetch(const at::Tensor& tensor);

Router* router();
void set_router(Router* router);  // nullptr: every call is torch's own

}  // namespace lamina::frontend
