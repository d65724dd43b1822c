// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/membership/member.h"
#include "lamina/messaging/mailbox.h"
#include "lamina/transport/transport.h"

namespace lamina::session {

// Talk of the ranks of a job when some are lost, each as the member with its rank's number. Words go from
// neighbour to neighbour ([Note: relays]), and losses are those of which the mailbox hears.
class EpochTalk {
 public:
  // `least`: ranks without which nobody goes on.
  EpochTalk(messaging::Mailbox& mailbox, transport::Transport& transport, std::size_t least, base::Patience patience);

  // Waits for the epoch that follows the one whose members were given last, or the job's: its members. Throws
  // base::PeerError where this rank goes on no more.
  std::vector<base::Rank> next();
  // As Mailbox::all_gather, among these members. Some may not have heard of their epoch: they are answered meanwhile.
  // Others may wait in what they do without a lost rank, for one that is here already: both learn of it as of any
  // mutual wait, and who is here goes on waiting.
  std::vector<value::Value> all_gather(std::span<const base::Rank> members, value::Value value);

 private:
  void attend();

  messaging::Mailbox& mailbox_;
  transport::Transport& transport_;
  const base::Patience patience_;
  membership::Member member_;
  std::int64_t ended_ = 0;
};

}  // namespace lamina::session
