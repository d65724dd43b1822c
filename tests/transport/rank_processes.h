// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "lamina/transport/ucx/ucx.h"
#include "tests/reserved_port.h"

namespace lamina::transport::testing {

// Receives what one rank's transport tells.
class Inbox {
 public:
  Transport::Events events();
  // Each waits at most a minute and then throws base::TimeoutError.
  Message next();
  std::string lost(base::Rank rank);  // why
  std::size_t waiting();
  int losses();  // how many were told

 private:
  void wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& ready, const char* what);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Message> messages_;
  std::map<base::Rank, std::string> lost_;
  int losses_ = 0;
};

// A message with a tree as its body.
Message object(std::string fields, value::Value body);

// The ranks of one job as processes forked from this one, which must have no threads. A rank fails when a GoogleTest
// expectation in it fails or it throws. All are dead when this object ends, and nothing of theirs is left in /dev/shm.
class RankProcesses {
 public:
  explicit RankProcesses(int size);
  ~RankProcesses();

  int size() const { return size_; }
  int port() const { return port_.number(); }
  UcxOptions options(int rank) const;

  // Starts a rank that runs `body`; for a rank in the job, open(rank) within it connects.
  void start(int rank, const std::function<void()>& body);
  // Starts all; each connects, starts its inbox, runs `body` and closes in order.
  using Body = std::function<void(Transport&, Inbox&)>;
  void run(const Body& body);

  // The process id of a rank that was started before, which ranks that are started later may ask, too.
  pid_t process(int rank) const { return running_.at(rank); }
  void kill(int rank, int signal);
  // The rank's exit status as waitpid gives it; kills it and fails after a minute.
  int wait(int rank);
  // Expects all that are still awaited to end well.
  void expect_success();

  // Lets ranks and the test pass points together: each signal lets one wait of the same name and rank end.
  void reach(int point);
  void await(int point, int count = 1);

 private:
  const int size_;
  const lamina::test::ReservedPort port_;
  int secret_ = -1;
  struct Points;
  Points* points_;  // shared with the ranks
  std::map<int, pid_t> running_;
};

}  // namespace lamina::transport::testing
