// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>

#include "lamina/collective/c10d_groups.h"
#include "lamina/dist/meeting.h"

namespace lamina::dist {

// The process group and store that initialize_dist made.
struct Current {
  environment::World world;
  std::unique_ptr<Meeting> meeting;  // none in a world that nobody launched
  std::unique_ptr<collective::C10dGroups> groups;
  c10::intrusive_ptr<c10d::ProcessGroup> group;  // of all ranks
};

Current* find_current();  // null before initialize_dist

// The group for the collective `what`; null where there is nobody to speak to. Throws base::UsageError where there is
// somebody, but no group.
c10d::ProcessGroup* group_for(const std::string& what);

}  // namespace lamina::dist
