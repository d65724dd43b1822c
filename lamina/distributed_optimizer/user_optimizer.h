// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "lamina/fused/declaration.h"
#include "lamina/value/value.h"

namespace lamina::distributed_optimizer {

class LocalParameters;

// Computes the loss again, and the gradients.
using Closure = std::function<void()>;

// Terms of an update.
struct UpdateTerms {
  double factor = 1;                            // by which gradients are still to be multiplied
  double norm = 0;                              // of all of them then; 0 where nobody has measured it
  const LocalParameters* parameters = nullptr;  // what stands in the groups; nullptr where all are parameters
  Closure closure;                              // the update calls it; empty where there is none, or it has been called
};

// An optimizer of the user's, as a face lends it to the engine.
class UserOptimizer {
 public:
  virtual ~UserOptimizer() = default;

  // A member of a group, with the name that it was given to the optimizer with, "" for none.
  struct Given {
    at::Tensor tensor;
    std::string name;
  };
  // `to` takes the place of `from`, with its state; undefined: nothing does.
  struct Moved {
    at::Tensor from;
    at::Tensor to;
  };

  // The names of the job's model's parameters, before it is cut.
  virtual std::vector<Given> named_parameters() const = 0;
  virtual std::vector<std::vector<Given>> groups() const = 0;
  // Every parameter, group by group.
  virtual std::vector<at::Tensor> members() const = 0;
  // Replaces the groups' members: trim() permanently, exchange() for one update and back.
  virtual void trim(const std::vector<std::vector<Given>>& groups, std::span<const Moved> moved) = 0;
  virtual void exchange(const std::vector<std::vector<at::Tensor>>& groups, std::span<const Moved> moved) = 0;
  // The state of a member, a dictionary by name; None where it has none.
  virtual value::Value state_of(const at::Tensor& member) const = 0;
  virtual void set_state(const at::Tensor& member, value::Value state) = 0;
  // A state as other ranks can have it, where it has objects of this process.
  virtual value::Value travelling(value::Value state) const { return state; }

  // Its class and the options of its groups: see [Note: options]. `counts`: how many members groups have is one.
  virtual std::string options(bool counts) const = 0;
  virtual fused::Needs needs() const = 0;  // of a parameter
  // True where an update needs the norm of all gradients.
  virtual bool needs_norm() const = 0;
  // True where an update takes gradients of any type and multiplies them itself, and gives halves their values.
  virtual bool takes_any_gradient() = 0;
  virtual void update(const UpdateTerms& terms) = 0;
  // Forgets the gradients of its members, or makes them zero.
  virtual void zero_grad(bool set_to_none) = 0;
};

}  // namespace lamina::distributed_optimizer
