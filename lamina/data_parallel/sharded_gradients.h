// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "lamina/base/wait.h"
#include "lamina/value/failure.h"

namespace lamina::data_parallel {

// Gradients of parameters whose elements the replicas have shared out among them, as a Reducer has them reduced in its
// passes: see [Note: passes]. A pass goes by its number.
class ShardedGradients {
 public:
  virtual ~ShardedGradients() = default;
  virtual bool has(const at::Tensor& parameter) const = 0;
  // A gradient has come to this parameter, one of them. From any thread.
  virtual void note(const at::Tensor& parameter, std::int64_t pass) = 0;
  // Collective over the replicas, which have met: adds this pass's gradients to the sums. With `ends` the shards get
  // the means of these sums as their gradients, and the sums begin anew.
  virtual void reduce(std::int64_t pass, bool ends, const base::Patience& patience) = 0;
  // A backward has ended whose gradients stay with this replica until a later pass.
  virtual void end_held_back() = 0;
  // The pass has failed, on a replica, of this. Returns at once.
  virtual void abandon(const value::Failure& failure) = 0;
  // The end of a step that is no pass, on all replicas, by this failure or none. Throws value::RemoteFailure where it
  // has failed on another replica that this one needs in its own.
  virtual void end_together(const std::optional<value::Failure>& /*failure*/) {}
  // Throws value::RemoteFailure where a step has failed on a replica that this one needs in its own. Returns at once.
  virtual void require_nobody_failed() {}
};

}  // namespace lamina::data_parallel
