// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "lamina/collective/group.h"
#include "lamina/data_parallel/named_tensor.h"

namespace lamina::data_parallel {

// How a replica's gradient of a parameter takes part in a reduction: what is largest on any replica holds for all.
enum class Gradient : std::int64_t {
  kNone,    // there is none
  kSent,    // in a bucket that was started early, as it is now
  kUnsent,  // it is still to be reduced
  kSparse,  // the same, and it never is started early
};

// Collective over the replicas: the largest of their words, each `mine` where it calls, on each of `parameters`. Throws
// base::UsageError on all of them when names, shapes or types of the parameters or buffers differ: collectives over
// them would mix up values.
std::vector<Gradient> agree(std::span<const NamedTensor> parameters, std::span<const Gradient> mine,
                            std::span<const NamedTensor> buffers, collective::Group& replicas,
                            const collective::CallOptions& options);

}  // namespace lamina::data_parallel
