// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>

#include "lamina/collective/gather_limits.h"
#include "lamina/collective/posted_gather.h"

namespace c10d {
class ProcessGroup;
}

namespace lamina::collective {

// [Note: levels] A group of k members on each of several hosts works by two levels: *within* a host is fast, and
// *across* hosts is slow. Member h * k + i is member i within host h, and member h across: those of one index. A gather
// crosses first, when each member has one part, and a sum last, when each has one part left: so every part crosses once
// to each other host, and no member sends another one's.

constexpr auto kByLevels = "lamina-hierarchical";  // the name of the backend

struct Levels {
  c10::intrusive_ptr<c10d::ProcessGroup> within, across;  // torch's, of any backend; nobody else uses them
  c10::intrusive_ptr<c10d::ProcessGroup> flat;  // all_to_all, and gathers too large for `limits`; nullptr: none are
  GatherLimits limits;
  std::shared_ptr<PostedGather> posted;  // crosses in all-gathers of tensors of the CPU; nullptr: `across` does
};

// torch's group over both, for tensors of the CPU and of CUDA: all_gather, reduce_scatter and all_to_all of single
// tensors, all_reduce and barrier, which lie as those of a flat group. They run in the order in which they are started,
// whichever is awaited first. Sums are made of the hosts' sums: each member has the same bits, which may differ from a
// flat group's in the last one. One that is under way cannot be given up, as Gloo's, but while it crosses by `posted`.
// Of n elements of each member all_gather sends (hosts - 1) * n across, reduce_scatter into n elements as many, and
// all_reduce 2 * (hosts - 1) / hosts * n / k.
//
// `timeout`: of those that say nothing else. Throw base::UsageError for tensors that do not fit, and at their end what
// the groups throw.
c10::intrusive_ptr<c10d::ProcessGroup> make_hierarchical(Levels levels, std::chrono::milliseconds timeout);

}  // namespace lamina::collective
