// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lamina::model {

enum class Role {
  kCalled,     // a node of the tree, which other ranks may call
  kContainer,  // a node that nobody calls: a list of modules
  kPart,       // no node: what it holds belongs to the nearest node above that is called
};

// A module as a face meets it on a walk over the model, parents before children, once in each of its places.
struct Module {
  struct Tensor {
    std::string name;
    at::Tensor value;
    bool buffer = false;
    bool has_shape = true;                 // false: of a lazy module
    std::vector<std::int64_t> whole = {};  // the shape of what it is a slice of; empty: it is whole
  };

  std::string path;       // from the root, whose own is empty
  std::uintptr_t id = 0;  // one in all its places
  std::string type;       // the name of its class
  Role role = Role::kCalled;
  bool indivisible = false;       // reads what is under it without calls, or calls it unseen: all of it is one node
  bool same_everywhere = false;   // of torch's own classes, as it was written: alike on all ranks if it holds nothing
  bool draws = false;             // may draw random numbers
  bool dynamic = false;           // returns what is not to be predicted
  bool keeps_statistics = false;  // has buffers that its calls change, whose order counts
  std::optional<int> placed_at;   // by hand
  std::vector<Tensor> tensors;    // its own; what is undefined does not count
};

// A parameter or buffer, under its first name, and the node that it belongs to.
struct ModuleTensor {
  std::string name;
  at::Tensor tensor;
  int node = 0;
  std::vector<std::int64_t> shape = {};  // of the whole, alike on all ranks
};

// [Note: module tree] The modules that can be owned, numbered alike on every rank, parents before children. A face
// fills it by a walk over its modules, and decides nothing; what follows from the walk stands here, once for both.
class ModuleTree {
 public:
  struct Node {
    std::string name;  // the first path that leads to it
    int parent = -1;   // -1: the root, which is node 0
    std::uintptr_t id = 0;
    bool callable = true;
    std::optional<int> placed_at;
    bool holds_nothing = false;               // and is the same everywhere: a call of it may run on any rank
    int places = 1;                           // that it has in the model
    std::vector<std::int64_t> parameter_ids;  // of its own parameters; an id of two nodes is a shared one
  };

  // Returns the number of its node where it has become one. Throws base::UsageError for a tensor without a shape.
  std::optional<int> add(const Module& module);

  const std::vector<Node>& nodes() const { return nodes_; }
  int size() const { return static_cast<int>(nodes_.size()); }
  // Each tensor once, in the model's order.
  const std::vector<ModuleTensor>& parameters() const { return parameters_; }
  const std::vector<ModuleTensor>& buffers() const { return buffers_; }
  std::vector<ModuleTensor> tensors() const;  // both
  // Finds the nodes whose modules hold it; none for what is not the model's.
  const std::vector<int>& holders(const at::Tensor& tensor) const;

  // Gives the node that each module is, or is part of.
  std::unordered_map<std::uintptr_t, int> homes() const;
  // Returns the node that a module is; -1 for none.
  int node(std::uintptr_t id) const;
  // Gives the paths of all modules in the order of the walk, a module's each, with their homes.
  std::vector<std::pair<std::string, int>> paths() const;

  // Says of each node whether its calls run in a random stream of their own: it, or what is under it, may draw.
  std::vector<bool> starts_rng_stream() const;
  // Says of each node whether its calls are waited for: it, or a module under it, is dynamic, or keeps statistics and
  // has parents in several nodes. So it sees its calls in the order of the program.
  std::vector<bool> waited_for() const;

  // Has a line for each module and tensor: equal texts, equal models.
  std::string description() const;

 private:
  // A module, and its place at the end of one path.
  struct Known {
    int home = 0;
    bool is_node = false, draws = false, dynamic = false, keeps_statistics = false;
    std::string line;  // of the description
  };
  struct Place {
    std::string path;
    int parent = -1;  // among the places
    int module = 0;
    int node = 0, called = 0;  // the nearest ones from here up
    bool closed = false;       // in an indivisible one
  };

  int place_above(const std::string& path) const;
  Known enter(const Module& module, const Place* above, Place& place);
  void hold(const Module& module, int node);
  // Per module: whether it, or one under it, is marked.
  std::vector<bool> with_any(std::vector<bool> marked) const;
  std::vector<bool> of_nodes(const std::vector<bool>& of_modules) const;

  std::vector<Node> nodes_;
  std::vector<int> module_of_node_;
  std::vector<ModuleTensor> parameters_, buffers_;
  std::vector<Known> modules_;
  std::vector<Place> places_;
  std::unordered_map<std::uintptr_t, int> by_id_;  // modules
  std::unordered_map<std::string, int> by_path_;   // places
  struct Holders {
    std::int64_t number = 0;  // among the parameters, or the buffers
    std::vector<int> nodes;
  };
  std::unordered_map<const void*, Holders> holders_;  // by TensorImpl
};

}  // namespace lamina::model
