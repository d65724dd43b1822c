// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch::nn {
class Module;
}

namespace lamina::frontend {

// A parameter or buffer of the model, and the node that holds it.
struct Held {
  std::string name;
  at::Tensor tensor;
  int node = 0;
};

// The modules under a root that can be owned: the root, and those that are called as a Child. What any other module
// holds belongs to the nearest of them above it. Numbered alike on every rank, parents before children.
class ModuleTree {
 public:
  struct Node {
    std::string name;  // the path from the root, whose own is empty
    int parent = -1;
    std::shared_ptr<torch::nn::Module> module;
    bool shared = false;  // it is in more than one place
  };

  explicit ModuleTree(std::shared_ptr<torch::nn::Module> root);

  const std::vector<Node>& nodes() const { return nodes_; }
  int size() const { return static_cast<int>(nodes_.size()); }
  int node(const torch::nn::Module* module) const;  // -1 for what is none

  // Each tensor once, under its first name.
  const std::vector<Held>& parameters() const { return parameters_; }
  const std::vector<Held>& buffers() const { return buffers_; }
  std::vector<Held> tensors() const;  // both
  // (name, tensor) as torch lists them: a shared one under each of its names.
  const std::vector<std::pair<std::string, at::Tensor>>& named() const { return named_; }

  // Per node, the numbers of its own parameters; a number of two nodes is a shared parameter.
  const std::vector<std::vector<std::int64_t>>& parameter_ids() const { return parameter_ids_; }
  // The nodes that hold a parameter; none for any other tensor.
  std::vector<int> holders(const at::Tensor& tensor) const;

  // One line per module and tensor: equal texts, equal structure.
  std::string description() const;

 private:
  void add(const std::shared_ptr<torch::nn::Module>& module, const std::string& name, int parent, bool called);
  void hold(const torch::nn::Module& module, const std::string& name, int node);

  std::vector<Node> nodes_;
  std::vector<Held> parameters_, buffers_;
  std::vector<std::pair<std::string, at::Tensor>> named_;
  std::vector<std::vector<std::int64_t>> parameter_ids_;
  std::unordered_map<const torch::nn::Module*, int> seen_;  // the node of what is one, else -1
  std::unordered_map<const void*, std::int64_t> numbers_;   // of parameters, by TensorImpl
  std::unordered_map<const void*, bool> buffers_seen_;
};

}  // namespace lamina::frontend
