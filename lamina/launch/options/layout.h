// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "lamina/environment/world.h"
#include "lamina/launch/options/options.h"

namespace lamina::launch {

// The position of this machine's ranks in the job.
struct Layout {
  int processes = 1;  // ranks here: base_rank to base_rank + processes - 1
  int world_size = 1;
  int base_rank = 0;
  int node_rank = 0;
  int nodes = 1;
  std::string master_address = "127.0.0.1";
  std::optional<int> master_port;  // none: any free one
  std::string warning;             // a line for the user, or nothing

  bool several_machines() const { return world_size > processes; }
};

// Facts that the layout is derived from, besides the options.
struct HostFacts {
  environment::Environment environment;
  std::function<int()> visible_gpus;
};

// Each value is the option, else the variable of the environment (LOCAL_WORLD_SIZE, WORLD_SIZE, BASE_RANK, NODE_RANK,
// MASTER_ADDR, MASTER_PORT), else what Slurm or MPI says of the machines they started us on, else its default. The
// variables of a rank of ours are not read: a job started within a rank is a job of its own. WORLD_SIZE counts for
// nothing where it equals LOCAL_WORLD_SIZE. A pod of Kubeflow's PyTorchJob, where RANK and WORLD_SIZE count pods, is
// one machine of them. Torchrun's options in the environment are read where the variables above say nothing:
// PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT, PET_RDZV_ENDPOINT. Throws
// ConfigError, one line.
Layout find_layout(const Options& options, const HostFacts& host);

}  // namespace lamina::launch
