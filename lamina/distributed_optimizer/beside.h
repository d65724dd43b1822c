// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <span>

#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"

namespace lamina::distributed_optimizer {

// [Note: beside the model] An optimizer may have parameters that are not the model's, as of a loss. Every rank has all
// of them, and begins with the values of the job's first rank. In a pipeline their gradients come on the rank that
// leads it: it alone has them in its groups, and gives the others their values after each update. The copies of that
// rank average the gradients with those of the model's parameters.

// Collective over `ranks`: gives tensors the values that they have on the first of these ranks. Throws
// base::UsageError, on all, where others are not alike.
void give_values(std::span<const at::Tensor> tensors, std::span<const base::Rank> ranks, messaging::Mailbox& mailbox,
                 const base::Patience& patience);

}  // namespace lamina::distributed_optimizer
