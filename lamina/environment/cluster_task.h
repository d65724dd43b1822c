// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lamina/environment/environment.h"

// The place in a job that a cluster's own launcher (srun, mpirun) tells the processes that it starts. Only the
// environment is read; none of the cluster's programs is called.
namespace lamina::environment {

struct ClusterTask {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int nodes = 1;
  int node = 0;               // which of them this task is on
  std::string first_host;     // of rank 0; empty where the environment does not tell
  std::string job;            // a name of this start of this job, the same for all its tasks
  std::string launcher;       // "srun", "mpirun"
  std::string once_per_node;  // how it is told to start one task on each machine
};

// The place of this process among those that srun or mpirun (Open MPI, MPICH, Intel MPI, MVAPICH2) started. There is
// none if it is the only one, or was not started so: a batch script and an interactive shell within an allocation are
// no tasks. Throws ConfigError on values that contradict each other.
std::optional<ClusterTask> cluster_task(const Environment& environment);

// The machines of the Slurm allocation this process is in; 0 outside of one.
int allocated_nodes(const Environment& environment);

// "gpu[01-03,7]-ib,login" is gpu01-ib, gpu02-ib, gpu03-ib, gpu7-ib, login. Only the first `limit` hosts are made.
std::vector<std::string> expand_hosts(std::string_view list, std::size_t limit = 1000000);

// A port that the tasks of one job agree on without speaking to each other: below those that systems give out.
int port_of(std::string_view job);

}  // namespace lamina::environment
