// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/rendezvous/job_store.h"

namespace lamina::rendezvous {

// All ranks at the job's store: each says something and hears what all have said. Rank 0 alone decides who is missing,
// so that all report the same. What is said lies under names that carry a random number, which rank 0 draws anew for
// each call: nobody finds there what an earlier call left, or what was put there beforehand. Who may read the store can
// read that number, and change what is said: see Hello.
class RollCall {
 public:
  // `name` is the same on all ranks, and new for each call; `timeout`, for messages, is what ends at the deadline.
  struct Options {
    std::string name;
    base::Rank rank;
    int size = 1;
    std::chrono::milliseconds timeout;
    base::Deadline deadline;
  };
  RollCall(JobStore& store, Options options);

  // The first thing to be called: what begins the names of this call, its random number included. Throws
  // base::TimeoutError when rank 0 does not come; base::ConfigError to a process whose rank another one has already.
  const std::string& meet();

  // Returns what each rank said. Throws base::TimeoutError that names the ranks which did not come; base::ConfigError
  // where ranks know of different numbers of ranks.
  std::vector<std::string> call(const std::string& said);

  // To be called when the others' words have been used. Rank 0 holds the store until all have. It leaves nothing of the
  // call there but the owner of each rank, for a second process of a rank that comes late. After a call that threw
  // there is nothing to leave.
  void leave();

 private:
  std::string key(const char* what, base::Rank rank) const;
  std::vector<std::string> keys(const char* what) const;  // of all ranks
  [[noreturn]] void differ(base::Rank rank, const std::string& size, const std::string& its_size);
  std::vector<base::Rank> missing_by(base::Deadline deadline);
  std::string judge();
  std::string await_verdict();
  std::string seconds() const;

  JobStore& store_;
  const Options options_;
  const base::Deadline verdict_by_;
  std::string call_;                // what begins the names
  std::vector<base::Rank> absent_;  // rank 0: who did not come
};

}  // namespace lamina::rendezvous
