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

// A measurement of all gradients before an update. The ranks that have one copy of the model together exchange squares,
// then those that have copies of the same agree on the rest, which their number does not make larger.
struct GradientMeasure {
  double norm = 0;                      // of the model's, each element once
  bool overflow = false;                // of some gradient of some rank, a copy's included
  bool are_alike = true;                // the options of all optimizers; see [Note: options]
  Unscaled unscaled = Unscaled::kNone;  // the worst that anyone has
};

// The ranks that measure together, and what this one knows.
struct Measurers {
  const model::ParameterTable* table = nullptr;  // nullptr: no model
  sharding::Sharding* sharding = nullptr;        // nullptr where nothing is
  std::vector<base::Rank> one_copy;              // those that have one copy of the model together
  std::vector<base::Rank> pipeline;              // those of them that have the same slices
  std::vector<base::Rank> copies;                // those that have copies of what this rank has, and call it, too
  bool trains_with_copies = true;                // so that their options are to be like this rank's
  std::int64_t options = 0;                      // the hash of this rank's
  Unscaled unscaled = Unscaled::kNone;
  messaging::Mailbox& mailbox;
  base::Patience patience;
};

// Collective over `one_copy`, then over `copies`, and the sharding group. `sources`: those that have the gradients on
// this rank, parameters and shards. Squares are added in the table's order: the same bits on all ranks of a copy.
GradientMeasure measure_gradients(std::span<const at::Tensor> sources, const Measurers& measurers,
                                  optim::Threads& threads);

}  // namespace lamina::distributed_optimizer
