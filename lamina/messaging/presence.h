// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "lamina/messaging/mailbox.h"

namespace lamina::messaging {

// [Note: presence] Torch's collectives do not say for whom they wait. So whoever has waited long in the n-th operation
// of a group says to its other members that it is there; those who have not said so are the ones that are awaited.
//
// One per job, which counts the operations of each group. Thread-safe.
class Presence {
 public:
  // Groups that have the same ranks are told apart by their names.
  struct Group {
    std::string name;
    std::vector<base::Rank> members;
  };

  explicit Presence(Mailbox& mailbox);

  std::int64_t next_operation(const Group& group);           // its n
  void skip_to(const Group& group, std::int64_t operation);  // which the next one follows
  void say(const Group& group, std::int64_t operation);
  // The part of its wait that tells whether others wait for it in turn: see [Note: mutual waits].
  WaitOperation operation(const Group& group, std::int64_t number) const;
  MutualWaits& waits() { return mailbox_.waits(); }
  std::vector<base::Rank> absent(const Group& group, std::int64_t operation);

 private:
  Mailbox& mailbox_;
  std::mutex mutex_;
  std::map<std::string, std::int64_t> operations_;                      // of each group, so far
  std::map<std::pair<base::Rank, std::string>, std::int64_t> present_;  // the latest that a member said it is in
};

}  // namespace lamina::messaging
