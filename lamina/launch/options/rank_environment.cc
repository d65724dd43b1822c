// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/rank_environment.h"

#include <algorithm>
#include <map>
#include <string_view>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/environment/rank_contract.h"

namespace lamina::launch {
namespace {

using base::str;
using Values = std::map<std::string, std::string>;

Values torchrun_contract(const Job& job, const Place& place) {
  return {
      {"RANK", str(place.rank)},
      {"LOCAL_RANK", str(place.local_rank)},
      {"WORLD_SIZE", str(job.world_size)},
      {"LOCAL_WORLD_SIZE", str(job.local_world_size)},
      {"GROUP_RANK", str(job.node_rank)},
      {"GROUP_WORLD_SIZE", str(job.nodes)},
      {"ROLE_NAME", "default"},
      {"ROLE_RANK", str(place.rank)},
      {"ROLE_WORLD_SIZE", str(job.world_size)},
      {"NODE_RANK", str(job.node_rank)},
      {"MASTER_ADDR", job.master_address},
      {"MASTER_PORT", str(job.master_port)},
      {"TORCHELASTIC_RUN_ID", job.run_id},
      {"TORCHELASTIC_RESTART_COUNT", str(job.restart)},
      {"TORCHELASTIC_MAX_RESTARTS", str(job.restarts)},
  };
}

// Variables that the launcher alone sets.
Values contract(const Job& job, const Place& place) {
  Values set = torchrun_contract(job, place);
  set["LAMINA_LAUNCHER"] = "1";
  set["LAMINA_RESTART"] = str(job.restart);
  if (job.least) set[environment::kElasticVariable] = str(*job.least, job.most ? str(":", *job.most) : "");
  if (!job.witness.empty()) set[environment::kWitnessVariable] = job.witness;
  if (place.door_fd >= 0) set[environment::kDoorVariable] = str(place.door_fd);
  if (place.newcomer) set[environment::kNewcomerVariable] = str(*place.newcomer);
  if (job.join_every) set[environment::kJoinEveryVariable] = str(job.join_every->count());
  if (job.spare_wait) set[environment::kSpareWaitVariable] = str(job.spare_wait->count());
  if (!job.doorkeeper.empty()) set[environment::kDoorkeeperVariable] = job.doorkeeper;
  if (place.secret_fd >= 0) set[environment::kSecretVariable] = str(place.secret_fd);
  if (place.progress_fd >= 0) set[environment::kProgressVariable] = str(place.progress_fd);
  return set;
}

// UCX installs signal handlers and memory hooks when it is loaded; only the environment before that can stop it.
Values defaults(const Job& job) {
  Values set = {
      {"OMP_NUM_THREADS", str(std::max(1, job.cores / std::max(1, job.local_world_size)))},
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
      {"UCX_HANDLE_ERRORS", "none"},
      {"UCX_MEM_EVENTS", "n"},
      {"PYTHONUNBUFFERED", "1"},
  };
  if (job.stacks) set["PYTHONFAULTHANDLER"] = "1";
  return set;
}

// An outer torchrun's word on a store and an error file that are not this job's.
constexpr std::string_view kDropped[] = {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"};

// True where the launcher alone says what a rank reads under this name: torchrun's contract and lamina's variables.
bool is_launchers(const std::string& name) {
  static const Values set = contract({.least = 1,
                                      .join_every = std::chrono::seconds(0),
                                      .spare_wait = std::chrono::seconds(0),
                                      .doorkeeper = "any",
                                      .witness = "any"},
                                     {.secret_fd = 0, .progress_fd = 0, .door_fd = 0, .newcomer = 0});
  return set.contains(name) || std::ranges::find(kDropped, name) != std::end(kDropped);
}

}  // namespace

Variables common_environment(const Job& job, const Variables& inherited) {
  Values missing = defaults(job);
  Variables result;
  for (const std::string& entry : inherited) {
    const std::string name = entry.substr(0, entry.find('='));
    missing.erase(name);
    if (!is_launchers(name)) result.push_back(entry);
  }
  for (const auto& [name, value] : missing) result.push_back(str(name, "=", value));
  return result;
}

Variables rank_environment(const Job& job, const Place& place, const Variables& inherited) {
  Variables result = common_environment(job, inherited);
  for (const auto& [name, value] : contract(job, place)) result.push_back(str(name, "=", value));
  return result;
}

Variables with_variables(Variables variables, const std::vector<std::string>& assignments, const std::string& source) {
  for (const std::string& assignment : assignments) {
    const std::string name = assignment.substr(0, assignment.find('='));
    if (name.empty()) throw base::ConfigError(str(source, " ", assignment, " has no name: write NAME=VALUE"));
    if (is_launchers(name)) {
      throw base::ConfigError(str(source, " ", name, " cannot be set: it is the launcher that sets it"));
    }
    if (assignment.size() == name.size()) {
      if (find(variables, name)) continue;
      throw base::ConfigError(str(source, " ", name, ": this variable is not set; write ", name, "=VALUE"));
    }
    std::erase_if(variables, [&](const std::string& entry) { return entry.starts_with(name + "="); });
    variables.push_back(assignment);
  }
  return variables;
}

}  // namespace lamina::launch
