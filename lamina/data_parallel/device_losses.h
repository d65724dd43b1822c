// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "lamina/base/wait.h"
#include "lamina/collective/group.h"

namespace lamina::data_parallel {

// The sums over all copies of the model, in their order, of each copy's `own` losses: a dense tensor of any device. The
// same on each copy. A BatchRecord has losses as numbers, for which the host would wait; it waits for none of these.
// Collective over `copies`; throws what collective::Work::wait() throws.
at::Tensor sum_of_copies(collective::Group& copies, const at::Tensor& own, const base::Patience& patience);

}  // namespace lamina::data_parallel
