// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/device_errors.h"

#include <algorithm>
#include <cstdint>
#include <set>

#include "lamina/base/str.h"
#include "lamina/device/failure.h"
#include "lamina/device/memory.h"
#include "lamina/device/rank_device.h"
#include "lamina/plan/format.h"
#include "lamina/value/away.h"
#include "lamina/value/reference_tensor.h"

namespace lamina::session {
namespace {

// Adds up memory of the rank's device, each piece once.
class Sum {
 public:
  std::int64_t of(const std::vector<at::Tensor>& tensors) {
    std::int64_t bytes = 0;
    for (const auto& tensor : tensors) {
      if (!tensor.defined() || value::is_pending(tensor) || tensor.device() != devices::rank_device()) continue;
      auto* memory = value::memory_of(tensor);
      const bool is_here = memory != nullptr && memory->_mutable_data_ptr_no_checks().get() != nullptr;
      if (is_here && counted_.insert(memory).second) bytes += static_cast<std::int64_t>(memory->nbytes());
    }
    return bytes;
  }

 private:
  std::set<const void*> counted_;
};

std::string place(const Session& session) {
  return base::str("rank ", session.world().rank, " of ", session.world().size);
}

std::string keys(Session& session) {
  const auto& config = session.config();
  const auto active = session.topology().size(topology::kPartitions) > 1
                          ? base::str("fewer active_microbatches (", *config.active_microbatches, "), ")
                          : "";
  return base::str("activations shrink with more microbatches (", session.job().microbatches(), "), ", active,
                   "activation checkpointing and offload_activations; all else with sharded_data_parallel_degree (",
                   config.sharded_data_parallel_degree, "), partitions (", config.partitions,
                   "), tensor_parallel_degree (", config.tensor_parallel_degree,
                   ") and bf16, states also with shard_optimizer_state");
}

}  // namespace

TensorsHeld tensors_of(const model::ParameterTable& table, sharding::Sharding* sharding) {
  TensorsHeld held;
  const auto add = [&held](const at::Tensor& tensor) {
    held.parameters.push_back(tensor);
    held.gradients.push_back(tensor.grad());
  };
  for (const auto* row : table.here()) add(row->tensor);
  for (std::size_t i = 0; sharding != nullptr && i < sharding->size(); ++i) add(sharding->shard(i));
  return held;
}

std::string told_of_full_memory(Session& session, const TensorsHeld& held, const std::string& module) {
  Sum sum;
  const auto parameters = sum.of(held.parameters), gradients = sum.of(held.gradients),
             states = sum.of(held.optimizer_states);
  const auto known = parameters + gradients + states;
  const auto peak = devices::tensor_bytes().value_or(devices::TensorBytes()).peak;
  return base::str(place(session), ": the memory of ", devices::rank_device(), " was full",
                   module.empty() ? "" : base::str(" in ", module), ". It had ", plan::format_bytes(parameters),
                   " of parameters and buffers, ", plan::format_bytes(gradients), " of gradients, ",
                   plan::format_bytes(states), " of optimizer states, and up to ",
                   plan::format_bytes(std::max<std::int64_t>(0, peak - known)), " of activations and others; ",
                   keys(session));
}

std::string told_of_failed_kernel(const Session& session) {
  if (devices::failure() == nullptr) return "";
  return base::str(place(session), ": ", devices::where_to_look(),
                   ". This rank has lost its device: start the job again");
}

}  // namespace lamina::session
