// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lamina/base/ids.h"
#include "lamina/environment/environment.h"

namespace lamina::environment {

// This process among the processes of its job.
struct World {
  base::Rank rank{0};
  int size = 1;
  int local_rank = 0;                     // among the processes of this job on this machine
  int local_size = 1;                     // 0: nobody says; ranks tell when they meet
  int node_rank = 0;                      // of this machine
  std::string master_addr = "127.0.0.1";  // where the job's store is, or is to be
  int master_port = 0;                    // 0: not given; anything free
  bool launched = false;                  // a launcher started this process
};

// Reads what torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; of which
// machine, NODE_RANK or GROUP_RANK say, else machines are taken to have equally many ranks. Without RANK and WORLD_SIZE
// it is what srun or mpirun say (cluster_task.h), else a world of one that nobody launched. A newcomer is that, too,
// until it has joined its job. Throws ConfigError naming every variable that is missing, not a number, or does not go
// with the others.
World read_world(const Environment& environment);

}  // namespace lamina::environment
