// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "lamina/job_checkpoint/parts.h"
#include "lamina/value/value.h"

namespace lamina::job_checkpoint {

// A state that belongs to what stands in an optimizer's groups for a parameter.
struct StateName {
  int optimizer = 0;
  std::string state;  // "" of a master
  std::string parameter;
};

// The parts that this rank writes into a checkpoint, as a face lists all that it has. Throws base::UsageError for what
// has no place in one, whoever would write it.
class SaveList {
 public:
  // The parts that it has: those that this rank is the one to write, or all of its own.
  enum class Has { kWritten, kAll };
  // The parts outlive it.
  explicit SaveList(const Parts& parts, Has has = Has::kWritten) : parts_(parts), has_(has) {}

  // Adds this rank's part of the row of this name, which has other names besides.
  void add_row(const std::string& name, const at::Tensor& elements, std::vector<std::string> also);
  // A state, or the master itself, of what stands for a parameter in the groups.
  void add_state(const LocalParameters& locals, const StateName& of, const at::Tensor& local, const at::Tensor& value);
  void add_content(const std::string& name, const at::Tensor& value);
  // A tree of values that this rank alone has, as a text, and its tensors; see Reader::tree().
  void add_tree(const std::string& name, const value::Value& tree);

  std::vector<checkpoint::Part> take() { return std::exchange(to_write_, {}); }
  // Takes the parts that other ranks write.
  std::vector<checkpoint::Part> take_others() { return std::exchange(others_, {}); }

 private:
  void add(archive::SavedTensor tensor, Parts::Piece piece, const at::Tensor& elements);

  const Parts& parts_;
  const Has has_;
  std::vector<checkpoint::Part> to_write_, others_;
};

// The name of a tensor that stands in what a manifest tells about a checkpoint.
std::string content_name(std::size_t number);

}  // namespace lamina::job_checkpoint
