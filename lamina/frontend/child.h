// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <typeinfo>

#include "lamina/frontend/calls.h"
#include "lamina/frontend/device_errors.h"
#include "lamina/frontend/placement.h"
#include "lamina/frontend/serializer.h"

namespace lamina {

namespace frontend {

template <class T>
using HolderOf = std::conditional_t<std::derived_from<T, torch::nn::Module>, torch::nn::ModuleHolder<T>, T>;

// Calls a module here: its own forward, or the one in the place of that.
template <class Impl, class... Args>
decltype(auto) call_forward(Impl& module, Args&&... args) {
  using Result = decltype(module.forward(std::forward<Args>(args)...));
  constexpr bool is_of_tensors = std::is_same_v<Result, at::Tensor> && sizeof...(Args) == 1 &&
                                 (std::is_same_v<std::decay_t<Args>, at::Tensor> && ...);
  try {
    if constexpr (is_of_tensors) {
      if (const Forward* const replaced = replaced_forward(&module)) return replaced->call(args...);
    }
    return module.forward(std::forward<Args>(args)...);
  } catch (c10::OutOfMemoryError& error) {
    note_module(error, module);
    throw;
  }
}

// See [Note: call kinds].
template <class Impl, class... Args>
struct CallKind {
  static_assert(!std::is_void_v<decltype(std::declval<Impl&>().forward(std::declval<Args>()...))>,
                "lamina: a forward that returns void cannot be called as a Child: return a tensor");
  using Result = std::decay_t<decltype(std::declval<Impl&>().forward(std::declval<Args>()...))>;

  static Value invoke(torch::nn::Module& module, Value arguments) {
    auto held = from_value<std::tuple<std::decay_t<Args>...>>(arguments);
    arguments = {};  // the module alone holds them now
    auto& impl = dynamic_cast<Impl&>(module);
    return std::apply([&](auto&... item) { return to_value(Result(call_forward(impl, static_cast<Args&&>(item)...))); },
                      held);
  }
  static inline const std::int64_t number = add_call_kind(typeid(CallKind).name(), &invoke);
};

}  // namespace frontend

// A module that may live on another rank: what a torch::nn module declares a member as that it calls.
//
//     struct BlockImpl : torch::nn::Module {
//       lamina::Child<Attention> attention;     // instead of: Attention attention{nullptr};
//       BlockImpl() { attention = register_module("attention", Attention(64)); }
//       at::Tensor forward(at::Tensor x) { return x + attention(x); }
//     };
//
// T is a module holder (what TORCH_MODULE makes) or a module. It is used as the holder is, and empty at first. A call
// through operator() runs on the rank that owns the module; arguments and results are what can travel (travel.h).
// Tensors that the module writes in place are written for its caller; other arguments are copies on another rank.
// `child->` reaches the module itself: its parameters have values on their owner only.
template <class T>
class Child : public frontend::HolderOf<T> {
  using Holder = frontend::HolderOf<T>;

 public:
  using Impl = typename Holder::ContainedType;

  Child() : Holder(nullptr) {}
  Child(std::nullptr_t) : Holder(nullptr) {}
  Child(std::shared_ptr<Impl> module) : Holder(std::move(module)) { note(); }
  Child(Holder holder) : Holder(std::move(holder)) { note(); }
  // Makes the module.
  template <class... Args>
    requires(sizeof...(Args) > 0 && !(std::convertible_to<Args, Holder> && ...) &&
             std::constructible_from<Impl, Args...>)
  explicit Child(Args&&... args) : Holder(std::make_shared<Impl>(std::forward<Args>(args)...)) {
    note();
  }

  template <class... Args>
  auto operator()(Args&&... args) const {
    using Kind = frontend::CallKind<Impl, Args...>;
    using Result = typename Kind::Result;
    auto& module = const_cast<Impl&>(*this->get());
    frontend::Router* const router = frontend::router();
    const auto place = router == nullptr ? std::nullopt : router->find(&module);
    if (!place) return Result(frontend::call_forward(module, std::forward<Args>(args)...));
    if (place->elsewhere || (place->anywhere && (frontend::lies_elsewhere(args) || ...))) {
      Value arguments = value::Tuple{{to_value<std::decay_t<Args>>(args)...}};
      return from_value<Result>(place->router->call(place->id, Kind::number, std::move(arguments)));
    }
    if (place->writes) {
      const auto fetch = [](const Value& argument) { value::for_each_tensor(argument, &frontend::fetch); };
      (fetch(to_value<std::decay_t<Args>>(args)), ...);
    }
    const auto scope = place->router->enter(place->id);
    if (scope && scope->wants_arguments()) scope->given(value::Tuple{{to_value<std::decay_t<Args>>(args)...}});
    Result result(frontend::call_forward(module, std::forward<Args>(args)...));
    if (scope && scope->wants_result()) scope->returned(to_value(result));
    return result;
  }

 private:
  void note() const {
    if (!this->is_empty()) frontend::register_child(this->ptr(), frontend::partition_around());
  }
};

}  // namespace lamina
