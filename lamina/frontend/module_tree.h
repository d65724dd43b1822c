// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lamina/frontend/slices.h"
#include "lamina/model/module_tree.h"

namespace torch::nn {
class Module;
}

namespace lamina::frontend {

using model::ModuleTensor;

// The tree of a torch::nn model; see [Note: module tree]. Nodes are the root, and what is called as a Child: what any
// other module holds belongs to the nearest of them above it.
class TorchModuleTree : public model::ModuleTree {
 public:
  // `scopes_count`: whether a Partition around the making of a Child places it. `slicings`: of parameters that are
  // slices.
  TorchModuleTree(std::shared_ptr<torch::nn::Module> root, bool scopes_count, const Slicings& slicings = {});

  const std::shared_ptr<torch::nn::Module>& root() const { return modules_.front(); }
  const std::shared_ptr<torch::nn::Module>& module(int node) const { return modules_.at(node); }
  using model::ModuleTree::node;
  int node(const torch::nn::Module* module) const { return node(reinterpret_cast<std::uintptr_t>(module)); }
  std::vector<std::string> names() const;  // by node
  // (name, tensor) as torch lists them: a shared one under each of its names.
  std::vector<std::pair<std::string, at::Tensor>> named() const;

 private:
  void visit(const std::shared_ptr<torch::nn::Module>& module, const std::string& path, bool is_node,
             const Slicings& slicings);

  bool scopes_count_;
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;  // by node
};

}  // namespace lamina::frontend
