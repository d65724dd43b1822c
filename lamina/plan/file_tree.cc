// SPDX-License-Identifier: Apache-2.0
#include "lamina/plan/file_tree.h"

#include <unordered_map>

#include "lamina/base/error.h"
#include "lamina/base/json_text.h"
#include "lamina/base/str.h"
#include "lamina/config/json_reader.h"

namespace lamina::plan {
namespace {

using base::Json;
using config::as_id;
using config::JsonReader;

struct FileNode {
  Node node;
  std::string id;
  std::string parent;  // an id; empty: it is the root
  std::string where;   // for errors
  std::vector<std::string> together;
};

std::vector<std::string> read_ids(const Json& list, const std::string& where) {
  std::vector<std::string> ids;
  for (const Json& each : list) {
    auto id = as_id(each);
    if (!id) throw base::ConfigError(base::str(where, ": ", each.dump(), " is not an id"));
    ids.push_back(std::move(*id));
  }
  return ids;
}

void read_optional(JsonReader& reader, const Goal& goal, FileNode& result) {
  Node& node = result.node;
  if (reader.has("anywhere")) node.anywhere = reader.flag("anywhere");
  if (reader.has("callable")) node.callable = reader.flag("callable");
  if (reader.has("placed_at")) node.placed_at = base::Partition(reader.integer("placed_at", 0, goal.partitions - 1));
  if (reader.has("together")) result.together = read_ids(reader.list("together"), result.where + ": together");
  if (reader.has("stretches")) node.stretches = read_stretches(reader);
  if (!reader.has("parameter_ids")) return;
  for (const Json& id : reader.list("parameter_ids")) {
    if (!id.is_number_integer()) reader.refuse("parameter_ids", id.dump() + " is not an integer");
    node.parameter_ids.push_back(id.get<std::int64_t>());
  }
}

FileNode read_node(const Json& json, std::size_t position, const Goal& goal) {
  FileNode result{.where = base::str("nodes[", position, "]")};
  JsonReader reader(json, result.where);
  result.id = reader.id("id");
  result.where = base::str("node ", result.id);
  reader.call_it(result.where);
  Node& node = result.node;
  const Json& parent = reader.at("parent");
  if (!parent.is_null() && parent != -1) result.parent = reader.id("parent");
  node.name = reader.text("name");
  if (!node.name.empty()) result.where += base::str(" (\"", node.name, "\")");
  reader.call_it(result.where);
  node.forward_us = reader.number("forward_us", 0, kMostTime);
  node.backward_us = reader.number("backward_us", 0, kMostTime);
  node.parameter_bytes = reader.integer("parameter_bytes", 0, kMostBytes);
  node.activation_bytes = reader.integer("activation_bytes", 0, kMostBytes);
  node.output_bytes = reader.integer("output_bytes", 0, kMostBytes);
  read_optional(reader, goal, result);
  reader.finish();
  return result;
}

class Builder {
 public:
  Builder(std::vector<FileNode> nodes, FileTree& into) : nodes_(std::move(nodes)), into_(into) {}

  void run() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (!at_.try_emplace(nodes_[i].id, i).second) fail(nodes_[i].where, "id", "stands twice");
    }
    children_.resize(nodes_.size());
    std::optional<std::size_t> root;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (!nodes_[i].parent.empty()) {
        children_[find(nodes_[i].parent, nodes_[i].where, "parent")].push_back(i);
      } else if (root) {
        fail(nodes_[i].where, "parent", base::str("is missing, but ", nodes_[*root].where, " is the root already"));
      } else {
        root = i;
      }
    }
    if (!root) throw base::ConfigError("nodes: none is the root; one has to have the parent null");
    add(*root);
    for (const FileNode& node : nodes_) reads_.add(node.node.stretches);
    for (const FileNode& node : nodes_) {
      reads_.check(node.node.stretches, node.where);
      if (!number_.contains(node.id)) fail(node.where, "parent", base::str(node.parent, " is, at last, under it"));
      for (const std::string& other : node.together) tie(node.id, find(other, node.where, "together"));
    }
  }

  void share(const std::vector<std::string>& ids, const std::string& where) {
    for (const std::string& id : ids) tie(ids.front(), find(id, where, "id"));
  }

 private:
  [[noreturn]] static void fail(const std::string& where, const std::string& field, const std::string& problem) {
    throw base::ConfigError(base::str(where, ": ", field, ": ", problem));
  }

  std::size_t find(const std::string& id, const std::string& where, const std::string& field) const {
    const auto found = at_.find(id);
    if (found == at_.end()) fail(where, field, base::str(id, " is the id of no node"));
    return found->second;
  }

  // Depth first, without recursion: a file may hold a chain of any depth.
  void add(std::size_t root) {
    std::vector<std::pair<std::size_t, int>> ahead{{root, -1}};
    while (!ahead.empty()) {
      const auto [at, parent] = ahead.back();
      ahead.pop_back();
      const int number = static_cast<int>(into_.tree.size());
      number_[nodes_[at].id] = number;
      into_.ids.push_back(nodes_[at].id);
      into_.tree.push_back(nodes_[at].node);
      into_.tree.back().parent = parent;
      for (auto child = children_[at].rbegin(); child != children_[at].rend(); ++child)
        ahead.emplace_back(*child, number);
    }
  }

  void tie(const std::string& id, std::size_t other) {
    into_.tree[number_.at(id)].together.push_back(number_.at(nodes_[other].id));
  }

  std::vector<FileNode> nodes_;
  FileTree& into_;
  std::unordered_map<std::string, std::size_t> at_;  // by id, the position in the file
  std::unordered_map<std::string, int> number_;      // by id, the node of the tree
  StretchReads reads_;
  std::vector<std::vector<std::size_t>> children_;
};

// Parameters of a node without ids of its own are nobody else's.
void number_parameters(ModuleTree& tree) {
  std::int64_t next = 0;
  for (const Node& node : tree) {
    for (std::int64_t id : node.parameter_ids) next = std::max(next, id + 1);
  }
  for (Node& node : tree) {
    if (node.parameter_ids.empty() && node.parameter_bytes > 0) node.parameter_ids.push_back(next++);
  }
}

// Sums of what the nodes hold, by so many ranks and microbatches, have to fit into 64 bits.
void check_total(const ModuleTree& tree, const Goal& goal) {
  double total = 0;
  for (const Node& node : tree) {
    total += 2.0 * static_cast<double>(node.parameter_bytes) + static_cast<double>(node.output_bytes) +
             static_cast<double>(goal.held()) * static_cast<double>(node.activation_bytes);
  }
  if (total > 4e18) throw base::ConfigError("nodes: more than 4e18 bytes together");
}

}  // namespace

FileTree::FileTree(const Json& nodes, const Json& shared, const Goal& goal) {
  std::vector<FileNode> read;
  for (std::size_t i = 0; i < nodes.size(); ++i) read.push_back(read_node(nodes[i], i, goal));
  if (read.empty()) throw base::ConfigError("nodes: is empty; expected at least the root");
  Builder builder(std::move(read), *this);
  builder.run();
  for (std::size_t i = 0; i < shared.size(); ++i) {
    const std::string where = base::str("shared[", i, "]");
    if (!shared[i].is_array()) throw base::ConfigError(base::str(where, ": is not a list of ids"));
    builder.share(read_ids(shared[i], where), where);
  }
  number_parameters(tree);
  check_total(tree, goal);
}

}  // namespace lamina::plan
