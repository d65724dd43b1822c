// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/layout.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/whole_number.h"
#include "lamina/environment/cluster_task.h"

namespace lamina::launch {
namespace {

using base::ConfigError;
using base::str;

// A number and where it was said, for messages: "--world_size 2", "WORLD_SIZE=2".
struct SourcedNumber {
  int value = 0;
  std::string words;
};

int number_of(const std::string& name, const std::string& text, int least) {
  const auto value = base::whole_number(text);
  if (value && *value >= least) return *value;
  if (base::beyond_int(text)) {
    throw ConfigError(str(name, "=", text, " in the environment is too large a number: correct or unset it"));
  }
  throw ConfigError(str(name, "=", text, " in the environment is not a whole number, ", least,
                        " or greater: ", "correct or unset it"));
}

class LayoutFinder {
 public:
  LayoutFinder(const Options& options, const HostFacts& host)
      : options_(options), host_(host), within_rank_(host.environment("LAMINA_LAUNCHER")) {
    if (!within_rank_) task_ = environment::cluster_task(host.environment);
    if (!task_) find_pods();
  }

  Layout find() {
    find_processes();
    if (options_.join) {
      layout_.world_size = layout_.processes;
      return layout_;
    }
    find_machines();
    find_world_size();
    if (layout_.world_size < layout_.processes) {
      throw ConfigError(str(world_.words, " is less than the ", layout_.processes, " ranks of this machine (",
                            processes_.words, "): raise the one or lower the other"));
    }
    const bool several = layout_.several_machines();
    if (several) {
      find_ranks();
    } else {
      require_no_ranks();
    }
    find_master(several);
    return layout_;
  }

 private:
  std::optional<std::string> variable(const std::string& name) const {
    if (within_rank_) return {};
    auto value = host_.environment(name);
    return value && value->empty() ? std::nullopt : value;
  }

  std::optional<SourcedNumber> said(const std::optional<int>& option, const char* flag, const std::string& name,
                                    int least) {
    if (option) return SourcedNumber{*option, str(flag, " ", *option)};
    const auto text = variable(name);
    if (!text) return {};
    return SourcedNumber{number_of(name, *text, least), str(name, "=", *text)};
  }

  // torchrun's words for the devices that are there are no number.
  std::optional<SourcedNumber> processes_of_torchrun() {
    const auto text = variable("PET_NPROC_PER_NODE");
    if (!text || *text == "auto" || *text == "gpu" || *text == "cpu") return {};
    return said({}, "", "PET_NPROC_PER_NODE", 1);
  }

  // Torchrun's "2" or "2:2"; "1:4" is a job that grows and shrinks.
  std::optional<SourcedNumber> nodes_of_torchrun() {
    const auto text = variable("PET_NNODES");
    if (!text) return {};
    const auto colon = text->find(':');
    if (colon == std::string::npos) return said({}, "", "PET_NNODES", 1);
    if (text->substr(0, colon) != text->substr(colon + 1)) {
      throw ConfigError(str("PET_NNODES=", *text, ": jobs here do not grow or shrink while they run: give one number"));
    }
    return SourcedNumber{number_of("PET_NNODES", text->substr(0, colon), 1), "PET_NNODES=" + *text};
  }

  // This machine among several, as a pod is told: by torchrun's options, or by RANK and WORLD_SIZE, which a rank of any
  // launcher has beside LOCAL_RANK.
  void find_pods() {
    pods_ = nodes_of_torchrun();
    pod_ = said({}, "", "PET_NODE_RANK", 0);
    for (const char* name : {"NODE_RANK", "BASE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
      if (variable(name)) return;
    }
    const auto all = said({}, "", "WORLD_SIZE", 1);
    const auto rank = said({}, "", "RANK", 0);
    if (!all || !rank) return;
    if (!pod_) pod_ = rank;
    if (pods_) return;
    const auto each = processes_of_torchrun();
    const bool ranks = each && all->value % each->value == 0 && all->value > each->value;
    pods_ = SourcedNumber{ranks ? all->value / each->value : all->value, all->words};
  }

  void find_processes() {
    auto given = said(options_.processes, "-n", "LOCAL_WORLD_SIZE", 1);
    if (!given) given = processes_of_torchrun();
    if (given) {
      processes_ = *given;
    } else {
      const int gpus = host_.visible_gpus();
      processes_ = {std::max(1, gpus), gpus > 0 ? str(gpus, " visible GPUs") : "no GPU, so one rank"};
    }
    layout_.processes = processes_.value;
  }

  // A cluster's launcher started one of us on each of several machines.
  void find_machines() {
    if (!task_) return;
    if (task_->size == task_->nodes) {
      machines_ = task_->size;
    } else if (!options_.world_size && !variable("WORLD_SIZE")) {
      throw ConfigError(str(task_->launcher, " started `lamina run` ", task_->size, " times on ", task_->nodes,
                            task_->nodes == 1 ? " machine" : " machines", ": have it started once on each, as in `",
                            task_->once_per_node, " lamina run ...`, or leave `lamina run` out"),
                        base::Code{"run-nested"});
    }
  }

  void find_world_size() {
    const auto local = variable("LOCAL_WORLD_SIZE");
    const auto inherited = variable("WORLD_SIZE");
    const int n = layout_.processes;
    if (options_.world_size || options_.nodes) {
      from_options(n);
    } else if (pods_) {
      const std::int64_t all = std::int64_t{pods_->value} * n;
      require_int(all, pods_->words);
      world_ = {static_cast<int>(all), str(pods_->words, ", machines of ", n)};
    } else if (inherited && inherited != local) {
      world_ = *said({}, "", "WORLD_SIZE", 1);
    } else {
      const std::int64_t all = std::int64_t{machines_} * n;
      require_int(all, str(machines_, " machines"));
      world_ = {static_cast<int>(all), str(machines_, " machines of ", n)};
    }
    layout_.world_size = world_.value;
    layout_.nodes = options_.nodes.value_or((world_.value - 1) / n + 1);
  }

  void from_options(int n) {
    if (options_.world_size) world_ = {*options_.world_size, str("--world_size ", *options_.world_size)};
    if (!options_.nodes) return;
    const std::int64_t all = std::int64_t{*options_.nodes} * n;
    if (options_.world_size && world_.value != all) {
      throw ConfigError(str(world_.words, " is not --nnodes ", *options_.nodes, " times ", n, " (", processes_.words,
                            "): give one of the two"));
    }
    require_int(all, str("--nnodes ", *options_.nodes));
    world_ = {static_cast<int>(all), str("--nnodes ", *options_.nodes)};
  }

  void require_int(std::int64_t ranks, const std::string& words) const {
    if (ranks <= std::numeric_limits<int>::max()) return;
    throw ConfigError(str(words, " times ", layout_.processes, " (", processes_.words, ") are too many ranks"));
  }

  void find_ranks() {
    const int n = layout_.processes;
    const int world = layout_.world_size;
    auto node = said(options_.node_rank, "--node_rank", "NODE_RANK", 0);
    const auto base = said(options_.base_rank, "--base_rank", "BASE_RANK", 0);
    if (!node && !base) node = pod_;
    if (!node && !base && task_ && machines_ > 1)
      node = SourcedNumber{task_->rank, str("task ", task_->rank, " of the job")};
    if (!node && !base) {
      throw ConfigError(str(world_.words, " with ", n, " ranks here is a job over several machines: give ",
                            "--node_rank or --base_rank (or NODE_RANK, BASE_RANK), which say which of them this is"));
    }
    const bool even = world % n == 0 && (!base || base->value % n == 0);
    if ((!node || !base) && !even) {
      throw ConfigError(str("cannot derive ",
                            node ? "--base_rank from " + node->words : "--node_rank from " + base->words,
                            ", for not all machines have the ", n, " ranks of this one: give both"));
    }
    layout_.node_rank = node ? node->value : base->value / n;
    const std::int64_t first = base ? base->value : std::int64_t{node->value} * n;
    if (first + n > world) {
      throw ConfigError(str("the ranks here, ", first, " to ", first + n - 1, " (", base ? base->words : node->words,
                            "), do not fit into ", world_.words));
    }
    layout_.base_rank = static_cast<int>(first);
    layout_.nodes = std::max(layout_.nodes, layout_.node_rank + 1);
  }

  void require_no_ranks() {
    const auto node = said(options_.node_rank, "--node_rank", "NODE_RANK", 0);
    const auto base = said(options_.base_rank, "--base_rank", "BASE_RANK", 0);
    for (const auto& given : {node, base}) {
      if (!given || given->value == 0) continue;
      throw ConfigError(str(given->words, " makes no sense for a job of one machine, where all ", layout_.processes,
                            " ranks are: leave it out, or give a greater --world_size"));
    }
  }

  void find_master(bool several) {
    auto address = options_.master_address ? options_.master_address : variable("MASTER_ADDR");
    auto port = said(options_.master_port, "--master_port", "MASTER_PORT", 1);
    if (several) {
      if (!address) address = variable("PET_MASTER_ADDR");
      if (!port) port = said({}, "", "PET_MASTER_PORT", 1);
      meet_at_endpoint(address, port);
    }
    if (port && port->value > 65535) throw ConfigError(str(port->words, " is no port: it ends at 65535"));
    if (port) layout_.master_port = port->value;
    if (address) layout_.master_address = *address;
    if (!several) return;
    const bool cluster = task_ && machines_ > 1;
    if (!address && cluster && !task_->first_host.empty()) {
      layout_.master_address = task_->first_host;
    } else if (!address) {
      throw ConfigError("a job over several machines needs --master_addr (or MASTER_ADDR): the machine of rank 0");
    }
    if (!port && cluster) {
      layout_.master_port = environment::port_of(task_->job);
    } else if (!port) {
      throw ConfigError("a job over several machines needs --master_port (or MASTER_PORT): a free port of " +
                        layout_.master_address + ", the same on all");
    }
  }

  // PET_RDZV_ENDPOINT, "HOST:PORT", where nothing else says it.
  void meet_at_endpoint(std::optional<std::string>& address, std::optional<SourcedNumber>& port) const {
    const auto endpoint = variable("PET_RDZV_ENDPOINT");
    if (!endpoint) return;
    const auto colon = endpoint->rfind(':');
    if (!address) address = endpoint->substr(0, colon);
    if (port || colon == std::string::npos) return;
    port =
        SourcedNumber{number_of("PET_RDZV_ENDPOINT", endpoint->substr(colon + 1), 1), "PET_RDZV_ENDPOINT=" + *endpoint};
  }

  const Options& options_;
  const HostFacts& host_;
  const bool within_rank_;
  std::optional<environment::ClusterTask> task_;
  int machines_ = 1;
  std::optional<SourcedNumber> pods_;  // how many machines there are, where a pod is told
  std::optional<SourcedNumber> pod_;   // which of them this is
  SourcedNumber processes_;
  SourcedNumber world_;
  Layout layout_;
};

}  // namespace

Layout find_layout(const Options& options, const HostFacts& host) {
  Layout layout = LayoutFinder(options, host).find();
  const int allocated = environment::allocated_nodes(host.environment);
  if (!layout.several_machines() && allocated > 1 && !environment::cluster_task(host.environment)) {
    layout.warning = str("the allocation has ", allocated, " machines, and this job uses one of them; start it as `",
                         "srun --ntasks-per-node=1 lamina run ...` to use all");
  }
  return layout;
}

}  // namespace lamina::launch
