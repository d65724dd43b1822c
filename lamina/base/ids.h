// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <ostream>

namespace lamina::base {

// An integer that names one kind of thing and mixes with no other kind.
template <class Tag>
struct Id {
  std::int64_t value = 0;

  constexpr Id() = default;
  constexpr explicit Id(std::int64_t v) : value(v) {}
  friend constexpr auto operator<=>(Id, Id) = default;
  friend std::ostream& operator<<(std::ostream& out, Id id) { return out << id.value; }
};

using Rank = Id<struct RankTag>;              // a process of the job, numbered in the world
using Partition = Id<struct PartitionTag>;    // a part of the model; its owner has the same pp_rank
using Microbatch = Id<struct MicrobatchTag>;  // a slice of the step's batch
using Step = Id<struct StepTag>;              // counts the calls of step functions since init
using ModuleId = Id<struct ModuleTag>;        // position in the model's module tree, parents first

// One call of a module of another rank, or of a microbatch's root.
struct CallId {
  Rank origin;  // the rank that issued the call
  Step step;
  Microbatch microbatch;
  std::int64_t counter = 0;  // counts what `origin` issued for this microbatch in this step; deliveries: downwards

  friend constexpr auto operator<=>(const CallId&, const CallId&) = default;
};

}  // namespace lamina::base

template <class Tag>
struct std::hash<lamina::base::Id<Tag>> {
  std::size_t operator()(lamina::base::Id<Tag> id) const noexcept { return std::hash<std::int64_t>{}(id.value); }
};
