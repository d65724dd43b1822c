// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/presence.h"

namespace lamina::messaging {
namespace {

std::string channel_of(const Presence::Group& group) {
  return group_channel(base::str("present in ", group.name).c_str(), group.members);
}

}  // namespace

Presence::Presence(Mailbox& mailbox) : mailbox_(mailbox) {
  const auto has_come = [this](const WaitOperation& operation, base::Rank) {
    std::lock_guard guard(mutex_);
    return operations_[operation.key] >= operation.number;
  };
  mailbox_.waits().keep(WaitKind::kGroup, {has_come, nullptr});
}

WaitOperation Presence::operation(const Group& group, std::int64_t number) const {
  return {WaitKind::kGroup, channel_of(group), number};
}

std::int64_t Presence::next_operation(const Group& group) {
  std::lock_guard guard(mutex_);
  return ++operations_[channel_of(group)];
}

void Presence::skip_to(const Group& group, std::int64_t operation) {
  std::lock_guard guard(mutex_);
  operations_[channel_of(group)] = operation;
}

void Presence::say(const Group& group, std::int64_t operation) {
  const auto channel = channel_of(group);
  for (auto rank : group.members) {
    if (rank == mailbox_.rank()) continue;
    try {
      mailbox_.tell(rank, channel, operation);
    } catch (const base::Error&) {  // of a rank that is lost, others tell
    }
  }
}

std::vector<base::Rank> Presence::absent(const Group& group, std::int64_t operation) {
  const auto channel = channel_of(group);
  std::lock_guard guard(mutex_);
  std::vector<base::Rank> ranks;
  for (auto rank : group.members) {
    auto& latest = present_[{rank, channel}];
    while (const auto said = mailbox_.poll(rank, channel)) latest = said->as<std::int64_t>();
    if (rank != mailbox_.rank() && latest < operation) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace lamina::messaging
