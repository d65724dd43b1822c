// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "lamina/collective/group.h"
#include "lamina/data_parallel/named_tensor.h"

namespace lamina::data_parallel {

// Collective over the replicas: which of `parameters` have a gradient on any of them. Throws base::UsageError on all of
// them when names, shapes or types of the parameters or buffers differ: collectives over them would mix up values.
std::vector<bool> agree(std::span<const NamedTensor> parameters, std::span<const NamedTensor> buffers,
                        collective::Group& replicas, const collective::Terms& terms);

}  // namespace lamina::data_parallel
