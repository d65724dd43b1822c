// SPDX-License-Identifier: Apache-2.0
#include "lamina/collective/groups.h"

#include <algorithm>
#include <chrono>
#include <ranges>
#include <stop_token>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lamina/base/deadline.h"
#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/collective/hierarchical.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"
#include "lamina/messaging/agreement.h"

namespace lamina::collective {
namespace {

constexpr auto kStopLook = std::chrono::milliseconds(20);
constexpr auto kLastParts = std::chrono::seconds(1);  // how long parts of a rank that has ended may be on their way

// Returns early where that is asked for.
void sleep(base::Clock::duration time, const std::stop_token& stop) {
  for (const auto end = base::Deadline::after(time); !end.expired() && !stop.stop_requested();) {
    std::this_thread::sleep_for(kStopLook);
  }
}

}  // namespace

Groups::Groups(const topology::Topology& topology, base::Rank rank, JobLinks links)
    : topology_(topology), rank_(rank), links_(std::move(links)) {}

Groups::~Groups() = default;

void Groups::make_by(Make make) { make_ = std::move(make); }

Group& Groups::get(topology::Group axis, const base::Patience& patience) {
  return *made(topology_.resolved(axis), patience).group;
}

c10::intrusive_ptr<c10d::ProcessGroup> Groups::torchs(topology::Group axis, const base::Patience& patience) {
  return made(topology_.resolved(axis), patience).torchs;
}

Group& Groups::by_levels(topology::Group axis, topology::Group within, topology::Group across,
                         const base::Patience& patience) {
  auto found = by_levels_.find(axis);
  if (found == by_levels_.end()) {
    const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(patience.timeout);
    const Membership membership{base::str(topology::name(axis), " by levels"), topology_.members(axis, rank_), rank_};
    Levels levels{torchs(within, patience), torchs(across, patience), torchs(axis, patience),
                  agreed_limits(membership.members, patience), nullptr};
    if (links_.transport != nullptr) {
      levels.posted = std::make_shared<PostedGather>(*links_.transport, std::string(topology::name(across)),
                                                     topology_.members(across, rank_));
    }
    found = by_levels_.emplace(axis, wrap(make_hierarchical(levels, timeout), membership, links_)).first;
  }
  return *found->second;
}

// All members send what is too large the same way.
GatherLimits Groups::agreed_limits(const std::vector<base::Rank>& members, const base::Patience& patience) const {
  const auto own = read_gather_limits(environment::process_environment());
  const auto word = base::str(own.scratch_bytes, " and ", own.sort_bytes);
  const auto hash = static_cast<std::int64_t>(base::hash64(std::string_view(word)));
  if (messaging::are_alike(*links_.mailbox, members, hash, patience)) return own;
  const auto words = links_.mailbox->all_gather(members, word, patience);
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto other = words[i].as<std::string>();
    if (other == word) continue;
    throw base::DesyncError(base::str("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES and SMDDP_AG_SORT_BUFFER_SIZE_BYTES are ",
                                      word, " on rank ", rank_, " and ", other, " on rank ", members[i],
                                      ": set them alike on all hosts"));
  }
  return own;
}

void Groups::lose(base::Rank lost) {
  const auto type = devices::rank_device().type();
  if (type == devices::kHost) return;
  const std::lock_guard guard(mutex_);
  for (const auto& [axis, each] : made_) {
    const auto members = topology_.members(axis, rank_);
    if (std::ranges::find(members, lost) == members.end()) continue;
    aborting_.emplace_back([group = each.torchs, type](const std::stop_token& job_ends) {
      sleep(kLastParts, job_ends);
      try {
        group->getBackend(type)->abort();  // takes a second or so
      } catch (const std::exception& error) {
        base::log_info(base::str("collectives that wait for a lost rank were not ended: ", error.what()));
      }
    });
  }
}

bool Groups::stuck() const {
  const auto one_is = [](const auto& group) { return group->stuck(); };
  return stuck_ || std::ranges::any_of(by_levels_ | std::views::values, one_is) ||
         std::ranges::any_of(made_, [](const auto& each) { return each.second.group->stuck(); });
}

void Groups::close() {
  stuck_ = stuck();
  std::map<topology::Group, Made> ended;
  {
    const std::lock_guard guard(mutex_);  // lose() may go through them
    ended.swap(made_);
  }
  const auto leave_behind = [](std::unique_ptr<Group>& group) {
    if (group->stuck()) [[maybe_unused]]
      const auto* kept = group.release();  // its end would wait
  };
  for (auto& [axis, group] : by_levels_) leave_behind(group);
  for (auto& [axis, each] : ended) leave_behind(each.group);
  by_levels_.clear();
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
  links_.mailbox->barrier(members, patience, "make");
  auto torchs = make_(axis);
  auto group = wrap(torchs, {name, std::move(members), rank_}, links_);
  std::lock_guard guard(mutex_);
  return made_.emplace(axis, Made{std::move(torchs), std::move(group)}).first->second;
}

}  // namespace lamina::collective
