// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "lamina/base/wait.h"
#include "lamina/collective/group.h"

namespace lamina::distributed_optimizer {

// Parameters that several ranks have whole, of which each updates a part: member i the elements from
// i * ceil(numel / members) on, as many, or what is left of them.
class Division {
 public:
  // `group`: the ranks that have the same parameters; it outlives this.
  Division(collective::Group& group, base::Patience patience) : group_(group), patience_(std::move(patience)) {}

  // The elements of a parameter that this member updates: first, and one past the last.
  std::pair<std::int64_t, std::int64_t> own(const at::Tensor& parameter) const;

  // Collective: each has updated its part of these; all get all of them. In portions of some 32 MiB.
  void gather(std::span<const at::Tensor> parameters);
  // Collective: the members' parts of something that is like the parameter.
  at::Tensor gather_parts(const at::Tensor& parameter, const at::Tensor& part) const;

 private:
  std::int64_t share(const at::Tensor& parameter) const {
    return (parameter.numel() + group_.size() - 1) / group_.size();
  }
  void gather_portion(std::span<const at::Tensor> parameters);
  // Memory for so many elements, which the next call has again: new pages would cost more than the copies.
  at::Tensor scratch(std::size_t number, std::int64_t length, const at::TensorOptions& options);

  collective::Group& group_;
  const base::Patience patience_;
  std::array<at::Tensor, 2> scratch_;
};

}  // namespace lamina::distributed_optimizer
