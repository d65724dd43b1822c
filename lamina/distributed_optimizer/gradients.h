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

// Says which gradients come from losses that were not scaled and should be.
enum class Unscaled : std::int64_t { kNone, kSome, kAll };

// A measurement of all gradients before an update. The ranks that have the shards of one model exchange their sums,
// then all ranks exchange one message each.
struct Measure {
  double norm = 0;                      // of the model's, each element once
  bool overflow = false;                // of some gradient of some rank, a copy's included
  std::vector<std::int64_t> options;    // hashes of those of everyone's optimizers; see [Note: options]
  Unscaled unscaled = Unscaled::kNone;  // the worst that anyone has
};

// The ranks that measure together, and what this one knows.
struct Measurers {
  const model::ParameterTable* table = nullptr;  // nullptr: no model
  sharding::Sharding* sharding = nullptr;        // nullptr where nothing is
  std::vector<base::Rank> one_copy;              // those that have one copy of the model together
  std::vector<base::Rank> everyone;              // those and the ones of other copies, who all call it
  std::int64_t options = 0;                      // the hash of this rank's
  Unscaled unscaled = Unscaled::kNone;
  messaging::Mailbox& mailbox;
  base::Patience patience;
};

// Collective over `everyone`, and the sharding group. `sources`: those that have the gradients on this rank, parameters
// and shards. Squares are added in the table's order: the same bits on all ranks of a copy.
Measure measure_gradients(std::span<const at::Tensor> sources, const Measurers& measurers, optim::Threads& threads);

}  // namespace lamina::distributed_optimizer
