// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "lamina/base/ids.h"
#include "lamina/launch/options/variables.h"

namespace lamina::launch {

// Facts that all ranks of a job are told.
struct Job {
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  std::string run_id;
  int world_size = 1;
  int local_world_size = 1;
  int node_rank = 0;
  int nodes = 1;
  int cores = 1;                                   // of this machine, shared by its ranks
  int restart = 0;                                 // how often the job was started before
  int restarts = 0;                                // how often it may be
  std::optional<int> least;                        // so many ranks go on where others are lost
  std::optional<int> most;                         // and so many there may be with newcomers
  std::optional<std::chrono::seconds> join_every;  // those who are started by hand join at most so often
  std::optional<std::chrono::seconds> spare_wait;  // of ranks that join, where there is no place
  std::string doorkeeper;                          // where this launcher is asked for the door; "": nowhere
  std::string witness;                             // where the job's is; "": it has none
  bool stacks = false;                             // Python is to write its stacks down when it is aborted
};

// Facts that one rank is told.
struct Place {
  base::Rank rank;
  int local_rank = 0;
  int secret_fd = -1;                // the rank reads the job's secret there, see Secret; -1: none
  int progress_fd = -1;              // and reports its steps there, see environment::ProgressReporter
  int door_fd = -1;                  // and finds there where newcomers join the job; -1: there are none
  std::optional<int> newcomer = {};  // it is one: its NewcomerTerms::together
};

// The environment of one rank: `inherited`, with the launcher's variables in place of what it says of them. What only
// has a default (OMP_NUM_THREADS, PYTHONUNBUFFERED, UCX_*) yields to an inherited value. A pure function.
Variables rank_environment(const Job& job, const Place& place, const Variables& inherited);

// Variables that all these have in common before any rank has a place: without what the launcher alone says.
Variables common_environment(const Job& job, const Variables& inherited);

// Returns `variables` with those that `assignments` set: NAME=VALUE, or NAME alone, which has to be set there already.
// Throws ConfigError on anything else, and on names that are the launcher's to set; `source` says where the assignments
// stand.
Variables with_variables(Variables variables, const std::vector<std::string>& assignments, const std::string& source);

}  // namespace lamina::launch
