// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace lamina::distributed_optimizer {

// [Note: stand-ins] Where a parameter of the model is not what an optimizer is to update, a *stand-in* takes its place
// in the optimizer's groups: this rank's elements of it, where its copies divide them, and those in float32, a
// *master*, where the parameter is half. Before a step it gets its part of the parameter's gradient, afterwards the
// parameter gets its values. States belong to stand-ins.
class StandIns {
 public:
  // A stand-in for elements [begin, end) of the tensor, flattened; of its shape where that is all of it. With
  // `in_float32` a copy, else it has the tensor's memory, which is contiguous.
  at::Tensor take(const at::Tensor& of, std::int64_t begin, std::int64_t end, bool in_float32);

  std::size_t size() const { return all_.size(); }
  std::optional<std::size_t> find(const at::Tensor& stand_in) const;
  const at::Tensor& stand_in(std::size_t number) const { return all_.at(number).own; }
  const at::Tensor& of(std::size_t number) const { return all_.at(number).of; }
  // Its elements of a tensor like the one that it is for; a view where that is contiguous.
  at::Tensor part_of(std::size_t number, const at::Tensor& whole) const;

  // Where the update gives a half tensor its values in the same pass; undefined for one that is no copy.
  at::Tensor half_copy(std::size_t number) const;

  // Gives each its part of the gradient: as it is where whoever updates takes any type and multiplies it (`as_is`),
  // else of its own type and multiplied by `factor`.
  void give_gradients(double factor, bool as_is);
  void forget_gradients();
  // Gives tensors the values of their copies.
  void write_back();
  // Gives copies the values of their tensors where those have changed since: what a master has beyond the precision of
  // an unchanged one stays.
  void follow();

 private:
  struct One {
    at::Tensor of, own;
    std::int64_t begin, end;
    bool copied;
  };
  std::vector<One> all_;
  std::unordered_map<const at::TensorImpl*, std::size_t> by_stand_in_;
};

}  // namespace lamina::distributed_optimizer
