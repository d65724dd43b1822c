// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "lamina/transport/local_puts.h"
#include "lamina/transport/transport.h"

namespace lamina::transport::inproc {

// Ranks of one process that send each other messages: for tests. One thread delivers everything, in an order drawn
// from `seed` among all orders that keep each pair's messages in sequence. Every message is packed and unpacked as on
// a wire, and its buffers are copied. What is put is copied by whoever comes second. Must outlive its transports.
class Network {
 public:
  Network(int size, std::uint64_t seed);
  ~Network();

  std::unique_ptr<Transport> connect(base::Rank rank);

  // Keeps back what `from` sends `to`, until it is released.
  void hold(base::Rank from, base::Rank to);
  void release(base::Rank from, base::Rank to);

  // Shows the other ranks what they see when the process of `rank` dies now: what it has sent, and then its loss.
  void kill(base::Rank rank);

 private:
  friend class Endpoint;
  using Pair = std::pair<base::Rank, base::Rank>;  // from, to

  void post(base::Rank from, base::Rank to, Frame frame);
  void attach(base::Rank rank, Transport::Events events);
  void detach(base::Rank rank);
  void deliver_until_stopped();
  std::optional<Pair> choose();  // a pair with a message for an attached rank

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Pair, std::deque<std::optional<Frame>>> queues_;  // nothing: the sender's loss
  std::set<Pair> held_;
  std::map<base::Rank, Transport::Events> attached_;
  std::vector<bool> dead_;
  std::optional<base::Rank> delivering_to_;
  LocalPuts puts_;
  std::mt19937_64 random_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace lamina::transport::inproc
