// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "lamina/collective/gather_limits.h"
#include "lamina/collective/group.h"
#include "lamina/topology/topology.h"

namespace lamina::collective {

// The groups of a job that this rank is in, one per axis: each made when somebody first uses it, and kept until the job
// closes them. Its members first agree, over the job's own messages, that they make it now. So members that use groups
// in different orders get base::DesyncError instead of waiting for ever, and a lost one is noticed.
//
// One thread at a time makes a group, outside of steps; any may get what is made.
class Groups {
 public:
  // How a face makes torch's group of an axis; collective over its ranks.
  using Make = std::function<c10::intrusive_ptr<c10d::ProcessGroup>(topology::Group axis)>;

  // `topology` outlives it; `links` have a mailbox.
  Groups(const topology::Topology& topology, base::Rank rank, JobLinks links);
  ~Groups();

  void make_by(Make make);

  // Throw base::UsageError where no face has said how, or the job has closed them; where it has to be made, what waits
  // for the members throw.
  Group& get(topology::Group axis, const base::Patience& patience);
  c10::intrusive_ptr<c10d::ProcessGroup> torchs(topology::Group axis, const base::Patience& patience);
  // The group of `axis` whose collectives go by the levels `within` and `across`. Nothing else uses those two. It has
  // the collectives of make_hierarchical(). Throws base::DesyncError where the members' environments set other
  // GatherLimits.
  Group& by_levels(topology::Group axis, topology::Group within, topology::Group across,
                   const base::Patience& patience);

  // A rank is lost: ends collectives of the rank's device that wait for it a second later, for no kernel of theirs
  // would, and whoever synchronizes with the device would wait for those. Those to which it did its part end well
  // meanwhile. Returns at once; from any thread.
  void lose(base::Rank lost);

  // True where the end of a group may wait for ever: see Group::stuck().
  bool stuck() const;
  // Lets go of them all, and of the face's way.
  void close();

 private:
  struct Made {
    c10::intrusive_ptr<c10d::ProcessGroup> torchs;
    std::unique_ptr<Group> group;
  };
  Made& made(topology::Group axis, base::Patience patience);
  GatherLimits agreed_limits(const std::vector<base::Rank>& members, const base::Patience& patience) const;

  const topology::Topology& topology_;
  const base::Rank rank_;
  const JobLinks links_;
  Make make_;
  std::mutex mutex_;
  std::map<topology::Group, Made> made_;  // under it
  std::map<topology::Group, std::unique_ptr<Group>> by_levels_;
  std::vector<std::jthread> aborting_;  // under the mutex
  bool stuck_ = false;                  // one of those that it has let go of
};

}  // namespace lamina::collective
