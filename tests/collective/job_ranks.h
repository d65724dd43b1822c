// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include "lamina/collective/c10d_groups.h"
#include "lamina/session/session.h"
#include "tests/dist/rank_forks.h"

namespace lamina::collective::test {

using dist::testing::expect_error;
using dist::testing::RankForks;
using topology::Group;

// One rank of a job, in a process that RankForks has started, with torch's groups as the C++ face makes them.
class JobRank {
 public:
  JobRank(const config::Config& config, C10dGroups::MakeBackend make_backend);
  ~JobRank();

  int rank() const { return static_cast<int>(session.world().rank.value); }
  int size() const { return session.world().size; }
  base::Patience patience(std::chrono::milliseconds timeout = std::chrono::seconds(30)) const;
  CallOptions call_options(const std::string& purpose = "testing") const { return {purpose, patience()}; }
  collective::Group& group(Group axis = Group::kWorld) { return session.groups().get(axis, patience()); }
  // Returns when all ranks have called it, over the job's messages.
  void meet() { session.mailbox().barrier(session.members(Group::kWorld), patience()); }

  session::Session session;
  const bool gloo;

 private:
  std::unique_ptr<C10dGroups> torchs_;
};

config::Config with_partitions(int partitions);

// Runs `body` in each rank of two jobs of that size, one over shared memory and one over Gloo; `killed` are expected to
// end by a signal.
void in_job(int size, const std::function<void(JobRank&)>& body, const config::Config& config = {},
            const std::vector<int>& killed = {});

// Runs `wait` on rank 0 of two, while the other one does nothing, of which no message tells.
void wait_alone(const std::function<void(JobRank&, collective::Group&)>& wait);

}  // namespace lamina::collective::test
