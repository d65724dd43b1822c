// SPDX-License-Identifier: Apache-2.0
#include "tests/collective/job_ranks.h"

#include <unistd.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace lamina::collective::test {

JobRank::JobRank(const config::Config& config, C10dGroups::MakeBackend make_backend)
    : session(config, environment::read_world(environment::process_environment()), {}),
      gloo(make_backend == &make_gloo) {
  session.groups().make_by([this, make_backend](Group axis) {
    if (!torchs_) {
      torchs_ = std::make_unique<C10dGroups>(session.world(), "test", std::chrono::seconds(30), nullptr, make_backend);
    }
    return torchs_->make(std::string(topology::name(axis)), session.members(axis));
  });
}

JobRank::~JobRank() {
  session.groups().close();
  session.close(true);
}

base::Patience JobRank::patience(std::chrono::milliseconds timeout) const {
  base::Patience patience{timeout, [] {}};
  return patience;
}

config::Config with_partitions(int partitions) {
  config::Config config;
  config.partitions = partitions;
  return config;
}

void in_job(int size, const std::function<void(JobRank&)>& body, const config::Config& config,
            const std::vector<int>& killed) {
  for (const auto make : {&make_backend, &make_gloo}) {
    RankForks ranks(size);
    for (int rank = 0; rank < size; ++rank) {
      ranks.start(rank, [&] {
        JobRank mine(config, make);
        body(mine);
      });
    }
    ranks.expect_success(killed);
  }
}

void wait_alone(const std::function<void(JobRank&, collective::Group&)>& wait) {
  int ended[2];
  ASSERT_EQ(::pipe(ended), 0);
  in_job(2, [&](JobRank& job) {
    auto& group = job.group();
    char byte = 'x';
    if (job.rank() == 1) {
      ASSERT_EQ(::read(ended[0], &byte, 1), 1);
      return;
    }
    wait(job, group);
    ASSERT_EQ(::write(ended[1], &byte, 1), 1);
  });
}

}  // namespace lamina::collective::test
