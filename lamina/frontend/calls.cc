// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/calls.h"

#include <atomic>
#include <map>
#include <mutex>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::frontend {
namespace {

struct CallKind {
  std::string type;
  Invoke invoke;
  bool ambiguous = false;
};

// Filled before main() by every file that calls a Child.
struct Kinds {
  std::mutex mutex;
  std::map<std::int64_t, CallKind> by_number;
};
Kinds& kinds() {
  static auto* kinds = new Kinds;
  return *kinds;
}

struct Modules {
  std::mutex mutex;
  std::map<const torch::nn::Module*, RegisteredChild> known;
  std::atomic<bool> has_replaced = false;  // a forward of one
  std::size_t sweep_at = 64;
};
Modules& modules() {
  static auto* modules = new Modules;
  return *modules;
}

// Under the mutex.
RegisteredChild& known(const torch::nn::Module* module, const char* what) {
  const auto found = modules().known.find(module);
  if (found == modules().known.end() || found->second.module.expired()) {
    throw base::UsageError(
        base::str(what, " of a module that is no lamina::Child: declare the member that calls it so"),
        base::Code{"cpp-no-child"});
  }
  return found->second;
}

std::atomic<Router*> current_router = nullptr;

}  // namespace

std::int64_t add_call_kind(const char* type, Invoke invoke) {
  const auto number = static_cast<std::int64_t>(base::hash64(type));
  std::lock_guard guard(kinds().mutex);
  const auto [known, added] = kinds().by_number.emplace(number, CallKind{type, invoke});
  if (!added && known->second.invoke != invoke) known->second.ambiguous = true;
  return number;
}

Invoke call_kind(std::int64_t number) {
  std::lock_guard guard(kinds().mutex);
  const auto found = kinds().by_number.find(number);
  if (found == kinds().by_number.end()) {
    throw base::UsageError("a call that this program does not make: run the same program on every rank",
                           base::Code{"cpp-programs-differ"});
  }
  if (found->second.ambiguous) {
    throw base::UsageError(base::str("two types of modules have the name ", found->second.type,
                                     ": take them out of their anonymous namespaces, or rename one"),
                           base::Code{"cpp-type-name"});
  }
  return found->second.invoke;
}

void register_child(const std::shared_ptr<torch::nn::Module>& module, std::optional<int> scope) {
  std::lock_guard guard(modules().mutex);
  auto& known = modules().known;
  RegisteredChild& entry = known[module.get()];
  if (entry.module.expired()) entry = {.module = module};  // new, or where another one was
  if (scope) entry.scope = scope;
  if (known.size() >= modules().sweep_at) {
    std::erase_if(known, [](const auto& item) { return item.second.module.expired(); });
    modules().sweep_at = 2 * known.size() + 64;
  }
}

const RegisteredChild* find_child(const torch::nn::Module* module) {
  std::lock_guard guard(modules().mutex);
  const auto found = modules().known.find(module);
  return found == modules().known.end() || found->second.module.expired() ? nullptr : &found->second;
}

void place(const torch::nn::Module* module, int partition) {
  std::lock_guard guard(modules().mutex);
  known(module, "set_partition()").partition = partition;
}

void vary(const torch::nn::Module* module) {
  std::lock_guard guard(modules().mutex);
  known(module, "set_dynamic()").dynamic = true;
}

void replace_forward(const torch::nn::Module* module, Forward forward) {
  std::lock_guard guard(modules().mutex);
  known(module, "a slice").forward = std::move(forward);
  modules().has_replaced = true;
}

const Forward* replaced_forward(const torch::nn::Module* module) {
  if (!modules().has_replaced) return nullptr;
  const auto* child = find_child(module);
  return child == nullptr || !child->forward.call ? nullptr : &child->forward;
}

bool lies_elsewhere(const at::Tensor& tensor) { return tensor.defined() && value::is_pending(tensor); }

void fetch(const at::Tensor& tensor) {
  if (tensor.defined()) value::materialise(tensor);
}

Router* router() { return current_router.load(std::memory_order_acquire); }
void set_router(Router* router) { current_router.store(router, std::memory_order_release); }

}  // namespace lamina::frontend
