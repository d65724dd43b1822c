// SPDX-License-Identifier: Apache-2.0
#include "lamina/messaging/presence.h"

namespace lamina::messaging {
namespace {

constexpr const char* kChannel = "present";

}  // namespace

Presence::Presence(Mailbox& mailbox) : mailbox_(mailbox) {
  const auto has_come = [this](const MutualWaits::Operation& operation, base::Rank) {
    std::lock_guard guard(mutex_);
    return operations_[operation.key] >= operation.number;
  };
  mailbox_.waits().keep(MutualWaits::Kind::kGroup, {has_come, nullptr});
}

MutualWaits::Operation Presence::operation(std::span<const base::Rank> members, std::int64_t number) const {
  return {MutualWaits::Kind::kGroup, group_channel(kChannel, members), number};
}

std::int64_t Presence::next_operation(std::span<const base::Rank> members) {
  std::lock_guard guard(mutex_);
  return ++operations_[group_channel(kChannel, members)];
}

void Presence::say(std::span<const base::Rank> members, std::int64_t operation) {
  const auto channel = group_channel(kChannel, members);
  for (auto rank : members) {
    if (rank == mailbox_.rank()) continue;
    try {
      mailbox_.send(rank, channel, operation);
    } catch (const base::Error&) {  // of a rank that is lost, others tell
    }
  }
}

std::vector<base::Rank> Presence::absent(std::span<const base::Rank> members, std::int64_t operation) {
  const auto channel = group_channel(kChannel, members);
  std::lock_guard guard(mutex_);
  std::vector<base::Rank> ranks;
  for (auto rank : members) {
    auto& latest = present_[{rank, channel}];
    while (const auto said = mailbox_.poll(rank, channel)) latest = said->as<std::int64_t>();
    if (rank != mailbox_.rank() && latest < operation) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace lamina::messaging
