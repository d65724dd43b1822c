// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "lamina/layout/region.h"

namespace lamina::distributed_optimizer {

// [Note: stand-ins] Where an optimizer is not to update a parameter of the model itself, a *stand-in* takes its place
// in the optimizer's groups. It is this rank's elements of the parameter, where copies of the model divide them. Where
// the parameter is half, it is a copy in float32, a *master*. Before a step it gets its part of the parameter's
// gradient, afterwards the parameter gets its values. States belong to stand-ins.
//
// Between steps a stand-in's gradient is read as its part of the parameter's gradient. It is in the same memory where
// it can lie there. Elsewhere it is a copy, and the next step takes over what a program has changed in it.
//
// A program may write to a parameter between steps, and give it other memory: in a step stand-ins have its values. A
// master keeps its precision while the parameter is unchanged. Where a program wrote to the master since the last step,
// and not to the parameter, the parameter gets the master's value with the next update. What it wrote to a part in the
// parameter's own memory the other holders get before they use the parameter again.
class StandIns {
 public:
  // A stand-in for a share of the tensor, flattened, or for all of it, of its shape. With `in_float32` a copy, else it
  // has the tensor's memory, or where its elements are in another order there, a copy in each step.
  at::Tensor take(const at::Tensor& of, const std::optional<layout::Share>& share, bool in_float32);

  std::size_t size() const { return all_.size(); }
  std::optional<std::size_t> find(const at::Tensor& stand_in) const;
  const at::Tensor& stand_in(std::size_t number) const { return all_.at(number).own; }
  const at::Tensor& of(std::size_t number) const { return all_.at(number).of; }
  const std::optional<layout::Share>& share(std::size_t number) const { return all_.at(number).share; }
  bool is_master(std::size_t number) const { return all_.at(number).master; }

  // The half tensor that the update may give its values in the same pass; undefined where it cannot.
  at::Tensor half_copy(std::size_t number) const;

  // The gradient of a stand-in between steps, undefined where there is none; and one in its place, or none.
  at::Tensor gradient(std::size_t number);
  void set_gradient(std::size_t number, const at::Tensor& gradient);
  // Gives each its part of the gradient: as it is where whoever updates takes any type and multiplies it (`as_is`),
  // else of its own type and multiplied by `factor`. Throws base::UsageError for a tensor that cannot be written to.
  void give_gradients(double factor, bool as_is);
  void forget_gradients();
  // Gives tensors the values of their stand-ins; with `as_is`, those that the update has not given them.
  void write_back(bool as_is);
  // Notes that tensors and stand-ins are as the step has left them.
  void settle();
  void settle(std::size_t number);
  // The parts in a parameter's own memory that a program has written to since.
  std::vector<std::size_t> written() const;
  // Gives stand-ins the values of their tensors, where those have changed since.
  void follow();

 private:
  // Gives tensors what a program has changed of copies of their gradients.
  void take_gradients();

  using Weak = c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>;
  struct One {
    at::Tensor of, own;
    std::optional<layout::Share> share;  // none: all of it
    bool master;
    std::int64_t of_version = 0, own_version = 0;  // when they were settled
    at::Tensor read = {};                          // the copy of its gradient that a program has
    std::int64_t read_version = 0, whole_version = 0;
    Weak read_of = Weak(at::Tensor().getIntrusivePtr());
  };
  std::vector<One> all_;
  std::unordered_map<const at::TensorImpl*, std::size_t> by_stand_in_;
};

}  // namespace lamina::distributed_optimizer
