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
};

}  // namespace lamina::collective
