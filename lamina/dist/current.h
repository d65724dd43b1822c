// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "lamina/collective/c10d_groups.h"
#include "lamina/collective/group.h"
#include "lamina/dist/meeting.h"

namespace lamina::dist {

// The process group and store that initialize_dist made.
struct Current {
  environment::World world;
  std::unique_ptr<Meeting> meeting;  // none in a world that nobody launched
  std::unique_ptr<collective::C10dGroups> groups;
  std::unique_ptr<collective::Group> group;  // of all ranks
  std::chrono::milliseconds timeout;
};

Current* find_current();  // null before initialize_dist

// The group for the collective `what`; null where there is nobody to speak to. Throws base::UsageError where there is
// somebody, but no group.
collective::Group* group_for(const std::string& what);

// Runs a collective of the group to its end. Throws base::PeerError, base::TimeoutError, which begin with this rank.
void run(const std::string& what,
         const std::function<collective::Started(collective::Group& group,
                                                 const collective::CallOptions& call_options)>& start);

}  // namespace lamina::dist
