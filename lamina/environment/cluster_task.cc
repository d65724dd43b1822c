// SPDX-License-Identifier: Apache-2.0
#include "lamina/environment/cluster_task.h"

#include <cstdint>

#include "lamina/base/error.h"
#include "lamina/base/hash.h"
#include "lamina/base/str.h"
#include "lamina/base/whole_number.h"

namespace lamina::environment {
namespace {

std::optional<int> parse(std::string_view text) {
  const auto value = base::whole_number(text);
  return value && *value >= 0 ? value : std::nullopt;
}

// VariableNames of the variables of one launcher.
struct VariableNames {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
};

constexpr VariableNames kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                                 "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr VariableNames kHydra{"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};  // MPICH, Intel MPI
constexpr VariableNames kMvapich{"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
                                 "MV2_COMM_WORLD_LOCAL_SIZE"};

class SetVariables {
 public:
  explicit SetVariables(const Environment& environment) : environment_(environment) {}

  bool has(const char* name) const { return environment_(name).has_value(); }
  std::string text(const char* name) const { return environment_(name).value_or(""); }

  int number(const char* name) const {
    const std::string value = text(name);
    if (const auto read = parse(value)) return *read;
    throw base::ConfigError(
        base::str(name, "=", value, ", set by the launcher of this cluster, is not a number: ",
                  "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT instead"),
        base::Code{"start-cluster-variables"});
  }

 private:
  const Environment& environment_;
};

// mpirun of Open MPI 4 tells its own address, "12.0;tcp://10.0.0.1,10.1.0.1:4711": that of the machine of rank 0, if it
// was called there, as it is in a batch script.
std::string address_of_mpirun(const std::string& uri) {
  constexpr std::string_view kScheme = "tcp://";
  const auto begin = uri.find(kScheme);
  if (begin == std::string::npos) return {};
  const auto end = uri.find_first_of(",:", begin + kScheme.size());
  return uri.substr(begin + kScheme.size(), end - begin - kScheme.size());
}

std::string first_slurm_host(const SetVariables& read) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}) {
    const auto hosts = expand_hosts(read.text(name), 1);
    if (!hosts.empty()) return hosts.front();
  }
  return {};
}

std::string first_given(const SetVariables& read, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (read.has(name)) return read.text(name);
  }
  return {};
}

std::optional<ClusterTask> mpi_task(const SetVariables& read) {
  for (const VariableNames& names : {kOpenMpi, kHydra, kMvapich}) {
    if (!read.has(names.rank) || !read.has(names.size) || !read.has(names.local_size)) continue;
    ClusterTask task{.rank = read.number(names.rank),
                     .size = read.number(names.size),
                     .local_rank = read.number(names.local_rank),
                     .local_size = read.number(names.local_size),
                     .launcher = "mpirun",
                     .once_per_node = "mpirun -npernode 1"};
    if (task.local_size >
        0) {  // machines have equally many tasks, one after the other, unless mpirun is told otherwise
      task.nodes = (task.size + task.local_size - 1) / task.local_size;
      task.node = (task.rank - task.local_rank) / task.local_size;
    }
    if (task.nodes == 1) {
      task.first_host = "127.0.0.1";
    } else {
      task.first_host = address_of_mpirun(read.text("OMPI_MCA_orte_hnp_uri"));
      if (task.first_host.empty()) task.first_host = first_slurm_host(read);
    }
    task.job = first_given(
        read, {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"});
    return task;
  }
  return {};
}

// "4(x2),3": how many tasks each machine has.
int tasks_on(std::string_view list, int node) {
  while (!list.empty()) {
    const std::string_view item = list.substr(0, list.find(','));
    const auto times_at = item.find("(x");
    const auto tasks = parse(item.substr(0, times_at));
    const auto times = times_at == std::string_view::npos
                           ? std::optional(1)
                           : parse(item.substr(times_at + 2, item.size() - times_at - 3));
    if (!tasks || !times) return 0;
    if (node < *times) return *tasks;
    node -= *times;
    list.remove_prefix(std::min(list.size(), item.size() + 1));
  }
  return 0;
}

std::optional<ClusterTask> slurm_task(const SetVariables& read) {
  if (!read.has("SLURM_STEP_NUM_TASKS") || !read.has("SLURM_PROCID")) return {};
  ClusterTask task{.rank = read.number("SLURM_PROCID"),
                   .size = read.number("SLURM_STEP_NUM_TASKS"),
                   .local_rank = read.number("SLURM_LOCALID"),
                   .local_size = tasks_on(read.text("SLURM_STEP_TASKS_PER_NODE"), read.number("SLURM_NODEID")),
                   .nodes = read.number("SLURM_STEP_NUM_NODES"),
                   .node = read.number("SLURM_NODEID"),
                   .first_host = first_slurm_host(read),
                   .job = base::str(read.text("SLURM_JOB_ID"), ".", read.text("SLURM_STEP_ID")),
                   .launcher = "srun",
                   .once_per_node = "srun --ntasks-per-node=1"};
  return task;
}

}  // namespace

std::optional<ClusterTask> cluster_task(const Environment& environment) {
  const SetVariables read(environment);
  auto task = mpi_task(read);
  if (!task) task = slurm_task(read);  // second: mpirun may itself be started by srun
  if (!task || task->size <= 1) return {};
  if (task->rank >= task->size || task->local_size < 1 || task->local_rank >= task->local_size) {
    throw base::ConfigError(
        base::str(task->launcher, " says that this is task ", task->rank, " of ", task->size, ", ", task->local_rank,
                  " of ", task->local_size,
                  " on its machine, which cannot be: set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ",
                  "MASTER_ADDR and MASTER_PORT yourself"),
        base::Code{"start-cluster-variables"});
  }
  return task;
}

int allocated_nodes(const Environment& environment) {
  return parse(environment("SLURM_JOB_NUM_NODES").value_or("")).value_or(0);
}

int port_of(std::string_view job) {
  constexpr int kFirst = 20000;
  constexpr int kCount = 12000;
  return kFirst + static_cast<int>(base::hash64(job) % kCount);
}

}  // namespace lamina::environment
