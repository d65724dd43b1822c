// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/model/parameter_table.h"
#include "lamina/optim/functional.h"
#include "lamina/sharding/sharding.h"

namespace lamina::distributed_optimizer {

// Tells of all gradients, measured before an update with one exchange beside that of the shards.
struct Measure {
  double norm = 0;                    // of the model's, each element once
  bool overflow = false;              // of some gradient of some rank, a copy's included
  std::vector<std::int64_t> options;  // hashes of those of everyone's optimizers; see [Note: options]
};

// Those who measure together, and what they know.
struct Measurers {
  const model::ParameterTable* table = nullptr;  // nullptr: no model
  sharding::Sharding* sharding = nullptr;        // nullptr where nothing is
  std::vector<base::Rank> pipeline;
  std::vector<base::Rank> everyone;  // those of the pipeline and of its copies, who all call it
  std::int64_t options = 0;          // the hash of this rank's
  messaging::Mailbox& mailbox;
  base::Patience patience;
};

// Collective over `everyone`, and the sharding group. `holders`: those that have the gradients on this rank, parameters
// and shards. Squares are added in the table's order: the same bits on all ranks of the pipeline.
Measure measure_gradients(std::span<const at::Tensor> holders, const Measurers& measurers, optim::Threads& threads);

}  // namespace lamina::distributed_optimizer
