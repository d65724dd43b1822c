// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "lamina/base/wait.h"
#include "lamina/transport/transport.h"

namespace lamina::collective {

// Values between ranks outside the pipeline: objects of the user, plans, parameters. Each pair of ranks has any number
// of channels, told apart by name; within one, values arrive in the order sent.
class Mailbox {
 public:
  explicit Mailbox(transport::Transport& transport) : transport_(transport) {}

  void send(base::Rank to, const std::string& channel, value::Value value);

  // The next value of `channel` from `from`. Throws base::PeerError when that rank is lost and has sent no more,
  // base::TimeoutError, and what the patience's interrupt throws.
  value::Value receive(base::Rank from, const std::string& channel, const base::Patience& patience);

  // Every member calls with the same `members`, its own rank among them: the members' values in that order.
  std::vector<value::Value> all_gather(std::span<const base::Rank> members, value::Value value,
                                       const base::Patience& patience);
  // Returns when every member has called.
  void barrier(std::span<const base::Rank> members, const base::Patience& patience);

  // Waits until one of `members` is lost, at most `within`: a clause that names it, "" when none is.
  std::string loss(std::span<const base::Rank> members, std::chrono::milliseconds within);
  // The same of the first rank that was lost, whichever it is: others may have left because of it.
  std::string first_loss();

  // [Note: presence] Torch's collectives do not say for whom they wait. So whoever has waited long in the n-th
  // operation of a group says to its other members that it is there; those who have not said so are the ones that are
  // awaited.
  std::int64_t next_operation(std::span<const base::Rank> members);  // its n
  void say_present(std::span<const base::Rank> members, std::int64_t operation);
  std::vector<base::Rank> absent(std::span<const base::Rank> members, std::int64_t operation);

  void deliver(transport::Message&& message);          // from the transport's thread
  void lose(base::Rank rank, const std::string& why);  // from the transport's thread

 private:
  using Key = std::pair<base::Rank, std::string>;

  std::vector<value::Value> exchange(std::span<const base::Rank> members, const std::string& channel,
                                     const value::Value& value, const base::Patience& patience);

  transport::Transport& transport_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<Key, std::deque<value::Value>> boxes_;  // none is empty
  std::map<base::Rank, std::string> lost_;
  std::string first_loss_;
  std::map<std::string, std::int64_t> operations_;  // of each group, so far
  std::map<Key, std::int64_t> present_;             // the latest operation that a member said it is in
};

}  // namespace lamina::collective
