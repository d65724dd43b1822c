// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/messaging/mailbox.h"

namespace lamina::sharding {

// Backends that compare nothing mix up values of one size, and wait for ever for those of another, where members begin
// different collectives. So each member says to the next one what it begins, and sees what the one before it did
// before it waits. Of one thread at a time.
class SameOrder {
 public:
  // `names`: of the parameters. `mailbox` outlives it.
  SameOrder(messaging::Mailbox& mailbox, std::vector<base::Rank> members, int member, std::vector<std::string> names);

  // This member begins a collective about these parameters; `what` is a word such as "values". Returns its number.
  std::int64_t begin(const std::string& what, std::span<const std::size_t> parameters);
  // Waits until the member before has begun that many. Throws base::DesyncError where they are not what this one has
  // begun, and what Mailbox::receive() throws.
  void check(std::int64_t number, const base::Patience& patience);

 private:
  std::string in_words(const std::string& word) const;

  messaging::Mailbox& mailbox_;
  const base::Rank self_, next_, previous_;
  const std::vector<std::string> names_;
  const std::string channel_;
  std::deque<std::string> unchecked_;
  std::int64_t begun_ = 0, checked_ = 0;
};

}  // namespace lamina::sharding
