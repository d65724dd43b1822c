// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "lamina/plan/goal.h"
#include "lamina/plan/module_tree.h"

// Module trees for tests.
namespace lamina::plan {

inline Goal over(int partitions) {
  Goal goal;
  goal.partitions = partitions;
  return goal;
}

// Builds a tree; parameters get fresh ids unless they are given.
class TreeBuilder {
 public:
  TreeBuilder() { tree.emplace_back(); }

  int add(int parent, const std::string& name, std::int64_t bytes = 0, bool callable = true) {
    Node node;
    node.parent = parent;
    node.name = path(parent, name);
    node.parameter_bytes = bytes;
    node.callable = callable;
    if (bytes > 0) node.parameter_ids.push_back(next_id_++);
    tree.push_back(node);
    return static_cast<int>(tree.size()) - 1;
  }

  // A module whose only parameter is one of `other`.
  int add_sharing(int parent, const std::string& name, int other) {
    const int node = add(parent, name);
    tree[node].parameter_bytes = tree[other].parameter_bytes;
    tree[node].parameter_ids = tree[other].parameter_ids;
    return node;
  }

  ModuleTree tree;

 private:
  std::string path(int parent, const std::string& name) const {
    return tree[parent].name.empty() ? name : tree[parent].name + "." + name;
  }

  std::int64_t next_id_ = 0;
};

// The layout of a small GPT, 128 wide: embedding, positions, a list of four blocks, a norm and a head tied to the
// embedding.
inline ModuleTree gpt() {
  TreeBuilder builder;
  const int embedding = builder.add(0, "embedding", 256 * 128 * 4);
  builder.add(0, "positions", 128 * 128 * 4);
  builder.add(0, "dropout");
  const int blocks = builder.add(0, "blocks", 0, false);
  for (int i = 0; i < 4; ++i) {
    const int block = builder.add(blocks, std::to_string(i));
    builder.add(block, "norm1", 1024);
    const int attention = builder.add(block, "attention");
    builder.add(attention, "qkv", 3 * 128 * 128 * 4);
    builder.add(attention, "out", 128 * 128 * 4);
    builder.add(block, "norm2", 1024);
    const int mlp = builder.add(block, "mlp");
    builder.add(mlp, "up", 4 * 128 * 128 * 4);
    builder.add(mlp, "gelu");
    builder.add(mlp, "down", 4 * 128 * 128 * 4);
  }
  builder.add(0, "norm", 1024);
  builder.add_sharing(0, "head", embedding);
  return builder.tree;
}

}  // namespace lamina::plan
