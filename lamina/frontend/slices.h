// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lamina/layout/parameter_layout.h"
#include "lamina/layout/region.h"
#include "lamina/session/session.h"
#include "lamina/tensor_parallel/team.h"

namespace torch::nn {
class Module;
}

// Layers of a model that are cut over the ranks of a TP_GROUP.
namespace lamina::frontend {

// A rank's place among those that have the other slices.
struct Member {
  std::string team;  // the name under which operators find them
  int index = 0;
  int degree = 1;
  bool in_parts = false;  // what lies between layers is cut by positions

  // This rank's part of so many positions, and the cut of states [N, S, H] by them.
  layout::Share positions(std::int64_t count) const;
  tensor_parallel::Cut cut(std::int64_t count) const;
};

// A module that computes with slices, where several ranks have the model's together; else it is a plain one. It has
// whole parameters at first, which its model cuts when it is wrapped.
class Sliced {
 public:
  virtual ~Sliced() = default;

  // One of its parameters, by name, the dimension that is cut, and the unit that is never torn.
  struct Cut {
    std::string parameter;
    int dim = 0;
    std::int64_t unit = 1;
  };
  // None for a module that computes with the slices of those in it. Throws base::UsageError where it cannot be cut.
  virtual std::vector<Cut> cuts() const { return {}; }
  // Its parameters are slices, from now on.
  virtual void begin(const Member& member) { member_ = member; }
  // It computes with whole parameters until begin(). Returns what that is to be given; nothing where it is whole
  // anyway.
  std::optional<Member> make_whole() {
    const auto before = member_;
    if (before) begin({});
    member_.reset();
    return before;
  }

 protected:
  // Nothing where it is whole.
  const std::optional<Member>& member() const { return member_; }

 private:
  std::optional<Member> member_;
};

// How parameters are cut, by the TensorImpl of each.
using Slicings = std::map<const void*, layout::Slicing>;

// The sizes of the whole that a tensor is a slice of; empty where it is whole.
std::vector<std::int64_t> whole_shape(const Slicings& slicings, const at::Tensor& tensor);

// The sizes of the whole that a tensor is, or is a slice of.
std::vector<std::int64_t> sizes_of_whole(const Slicings& slicings, const at::Tensor& tensor);

}  // namespace lamina::frontend
