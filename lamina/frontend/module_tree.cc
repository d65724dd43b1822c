// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/module_tree.h"

#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <sstream>

#include "lamina/frontend/calls.h"

namespace lamina::frontend {
namespace {

std::string join(const std::string& path, const std::string& name) { return path.empty() ? name : path + "." + name; }

// torch's Sequential calls what it holds by itself, not as a Child.
bool calls_by_itself(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr;
}

}  // namespace

ModuleTree::ModuleTree(std::shared_ptr<torch::nn::Module> root) {
  add(root, "", -1, true);
  for (const auto& named : root->named_parameters()) named_.emplace_back(named.key(), named.value());
  for (const auto& named : root->named_buffers()) named_.emplace_back(named.key(), named.value());
}

void ModuleTree::add(const std::shared_ptr<torch::nn::Module>& module, const std::string& name, int parent,
                     bool called) {
  const auto [place, is_new] = seen_.emplace(module.get(), called ? size() : -1);
  if (!is_new) {
    if (place->second >= 0) nodes_[place->second].shared = true;
    return;
  }
  int node = parent;
  if (called) {
    node = size();
    nodes_.push_back({name, parent, module});
    parameter_ids_.emplace_back();
  }
  hold(*module, name, node);
  const bool by_itself = calls_by_itself(*module);
  for (const auto& child : module->named_children()) {
    const bool is_node = !by_itself && frontend::find_child(child.value().get()) != nullptr;
    add(child.value(), join(name, child.key()), node, is_node);
  }
}

void ModuleTree::hold(const torch::nn::Module& module, const std::string& name, int node) {
  for (const auto& own : module.named_parameters(/*recurse=*/false)) {
    if (!own.value().defined()) continue;
    const auto [number, is_new] =
        numbers_.emplace(own.value().unsafeGetTensorImpl(), static_cast<std::int64_t>(numbers_.size()));
    if (is_new) parameters_.push_back({join(name, own.key()), own.value(), node});
    auto& ids = parameter_ids_[node];
    if (std::ranges::find(ids, number->second) == ids.end()) ids.push_back(number->second);
  }
  for (const auto& own : module.named_buffers(/*recurse=*/false)) {
    if (!own.value().defined() || !buffers_seen_.emplace(own.value().unsafeGetTensorImpl(), true).second) continue;
    buffers_.push_back({join(name, own.key()), own.value(), node});
  }
}

int ModuleTree::node(const torch::nn::Module* module) const {
  const auto found = seen_.find(module);
  return found == seen_.end() ? -1 : found->second;
}

std::vector<Held> ModuleTree::tensors() const {
  std::vector<Held> all = parameters_;
  all.insert(all.end(), buffers_.begin(), buffers_.end());
  return all;
}

std::vector<int> ModuleTree::holders(const at::Tensor& tensor) const {
  std::vector<int> nodes;
  const auto number = numbers_.find(tensor.unsafeGetTensorImpl());
  if (number == numbers_.end()) return nodes;
  for (int node = 0; node < size(); ++node) {
    const auto& ids = parameter_ids_[node];
    if (std::ranges::find(ids, number->second) != ids.end()) nodes.push_back(node);
  }
  return nodes;
}

std::string ModuleTree::description() const {
  std::ostringstream lines;
  for (const auto& node : nodes_) lines << "module \"" << node.name << "\": " << node.module->name() << "\n";
  for (const auto& held : tensors()) {
    lines << "tensor \"" << held.name << "\": " << held.tensor.sizes() << " " << held.tensor.scalar_type() << "\n";
  }
  return lines.str();
}

}  // namespace lamina::frontend
