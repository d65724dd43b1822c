// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lamina/frontend/child.h"

// torch's Sequential and ModuleList call what they hold by themselves, or hand out bare modules. These hold children.
namespace lamina {

// A list of modules of one class, each of which may live on another rank; their names are "0", "1", ... It is a module
// without a forward: register it, then go through it and call what it holds.
//
//     lamina::ChildList<Block> blocks;
//     ... register_module("blocks", blocks); blocks->push_back(Block(64));
//     for (auto& block : *blocks) x = block(x);
//
//     lamina::ChildList<Block> two(Block(64), Block(64));
template <class T>
class ChildListImpl : public torch::nn::Module {
 public:
  ChildListImpl() = default;
  template <class... Modules>
    requires(sizeof...(Modules) > 0 && (std::convertible_to<Modules, Child<T>> && ...))
  explicit ChildListImpl(Modules... modules) {
    (push_back(std::move(modules)), ...);
  }

  void push_back(Child<T> child) {
    register_module(std::to_string(children_.size()), child.ptr());
    children_.push_back(std::move(child));
  }
  std::size_t size() const { return children_.size(); }
  Child<T>& operator[](std::size_t index) { return children_.at(index); }
  auto begin() { return children_.begin(); }
  auto end() { return children_.end(); }

 private:
  std::vector<Child<T>> children_;
};
template <class T>
using ChildList = torch::nn::ModuleHolder<ChildListImpl<T>>;

// Modules that take one tensor and return one, each called with what the one before it returned; their names are "0",
// "1", ... or those that push_back() is given.
class SequentialImpl : public torch::nn::Module {
 public:
  template <class... Modules>
    requires(std::is_base_of_v<torch::detail::ModuleHolderIndicator, Modules> && ...)
  explicit SequentialImpl(Modules... modules) {
    (push_back(std::move(modules)), ...);
  }

  template <class T>
  void push_back(T module) {
    push_back(std::to_string(calls_.size()), std::move(module));
  }
  template <class T>
  void push_back(std::string name, T module) {
    Child<T> child(std::move(module));
    register_module(std::move(name), child.ptr());
    calls_.push_back([child](const at::Tensor& x) { return child(x); });
  }
  std::size_t size() const { return calls_.size(); }
  std::shared_ptr<torch::nn::Module> operator[](std::size_t index) const { return children().at(index); }

  at::Tensor forward(at::Tensor x) {
    for (const auto& call : calls_) x = call(x);
    return x;
  }

 private:
  std::vector<std::function<at::Tensor(const at::Tensor&)>> calls_;
};
TORCH_MODULE(Sequential);

}  // namespace lamina
