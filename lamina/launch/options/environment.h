// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"

namespace lamina::launch {

using Variables = std::vector<std::string>;  // "NAME=value" each

std::optional<std::string> find(const Variables& variables, const std::string& name);

// What all ranks of a job are told.
struct Job {
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  std::string run_id;
  int world_size = 1;
  int local_world_size = 1;
  int node_rank = 0;
  int nodes = 1;
  int cores = 1;        // of this machine, shared by its ranks
  int restart = 0;      // how often the job was started before
  int restarts = 0;     // how often it may be
  bool stacks = false;  // Python is to write its stacks down when it is aborted
};

// What one rank is told.
struct Place {
  base::Rank rank;
  int local_rank = 0;
  int secret_fd = -1;    // the rank reads the job's secret there, see Secret; -1: none
  int progress_fd = -1;  // and reports its steps there, see environment::ProgressReporter
};

// Whether the launcher alone says what a rank reads under this name: torchrun's contract and lamina's variables.
bool is_launchers(const std::string& name);

// The environment of one rank: `inherited`, with the launcher's variables in place of what it says of them. What only
// has a default (OMP_NUM_THREADS, PYTHONUNBUFFERED, UCX_*) yields to an inherited value. A pure function.
Variables rank_environment(const Job& job, const Place& place, const Variables& inherited);

// Variables that all these have in common before any rank has a place: without what the launcher alone says.
Variables common_environment(const Job& job, const Variables& inherited);

// This process's own environment, and the number of cores it may use.
Variables own_environment();
int available_cores();

}  // namespace lamina::launch
