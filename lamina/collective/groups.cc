// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/groups.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::collective {

Groups::Groups(const topology::Topology& topology, base::Rank rank, JobLinks links)
    : topology_(topology), rank_(rank), links_(std::move(links)) {}

Groups::~Groups() = default;

void Groups::make_by(Make make) { make_ = std::move(make); }

Group& Groups::get(topology::Group axis, const base::Patience& patience) { return *made(axis, patience).group; }

c10::intrusive_ptr<c10d::ProcessGroup> Groups::torchs(topology::Group axis, const base::Patience& patience) {
  return made(axis, patience).torchs;
}

bool Groups::stuck() const {
  return std::ranges::any_of(made_, [](const auto& each) { return each.second.group->stuck(); });
}

void Groups::close() {
  made_.clear();
  make_ = nullptr;
}

Groups::Made& Groups::made(topology::Group axis, base::Patience patience) {
  {
    std::lock_guard guard(mutex_);
    if (const auto found = made_.find(axis); found != made_.end()) return found->second;
  }
  const auto name = std::string(topology::name(axis));
  if (!make_) throw base::UsageError(base::str("the group ", name, " of a job that was shut down"));
  auto members = topology_.members(axis, rank_);
  const auto call = patience.call ? patience.call() : base::Call();
  patience.call = [&] {
    return base::Call{call.name.empty() ? base::str("the first use of ", name) : call.name, call.where,
                      base::str("make ", name)};
  };
  links_.mailbox->all_gather(members, value::None{}, patience);
  auto torchs = make_(axis);
  auto group = wrap(torchs, {name, std::move(members), rank_}, links_);
  std::lock_guard guard(mutex_);
  return made_.emplace(axis, Made{std::move(torchs), std::move(group)}).first->second;
}

}  // namespace lamina::collective
