// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/collective/groups.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/topology/topology.h"

namespace lamina::collective {

// The ranks of a job as one of them sees them: who they are to it, and how it meets them. Parts of the engine that
// need no more of a job have this; see [Note: groups by meaning].
struct Ranks {
  const topology::Topology& topology;  // this and the next two outlive it
  messaging::Mailbox& mailbox;
  Groups& groups;
  base::Rank own;
  std::function<base::Patience()> patience;  // of a wait that begins now

  std::vector<base::Rank> everyone() const { return topology.members(topology::Group::kWorld, own); }
  // The ranks that have one copy of the model together.
  std::vector<base::Rank> one_copy() const { return topology.members(topology::kOneCopy, own); }
  // The ranks that have one partition each of the same slice of it: a pipeline.
  std::vector<base::Rank> pipeline() const { return topology.members(topology::kPartitions, own); }
  // The one of them that runs the bodies of step functions.
  base::Rank leader() const { return pipeline().front(); }
  bool leads() const { return leader() == own; }
  topology::Coordinates place() const { return topology.coordinates(own); }
  // The ranks that have the same parts of the model as this one, one in each copy of it.
  std::vector<base::Rank> of_copies() const { return topology.members(topology::kSameParts, own); }
  // How many these are.
  int copies() const { return topology.size(topology::kSameParts); }
};

}  // namespace lamina::collective
