// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "lamina/messaging/mailbox.h"

namespace lamina::messaging {

// [Note: presence] Torch's collectives do not say for whom they wait. So whoever has waited long in the n-th operation
// of a group says to its other members that it is there; those who have not said so are the ones that are awaited.
//
// One per job, for the groups are counted by their members. Thread-safe.
class Presence {
 public:
  explicit Presence(Mailbox& mailbox);

  std::int64_t next_operation(std::span<const base::Rank> members);  // its n
  void say(std::span<const base::Rank> members, std::int64_t operation);
  // The part of its wait that tells whether others wait for it in turn: see [Note: mutual waits].
  MutualWaits::Operation operation(std::span<const base::Rank> members, std::int64_t number) const;
  MutualWaits& waits() { return mailbox_.waits(); }
  std::vector<base::Rank> absent(std::span<const base::Rank> members, std::int64_t operation);

 private:
  Mailbox& mailbox_;
  std::mutex mutex_;
  std::map<std::string, std::int64_t> operations_;                      // of each group, so far
  std::map<std::pair<base::Rank, std::string>, std::int64_t> present_;  // the latest that a member said it is in
};

}  // namespace lamina::messaging
