// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/options.h"

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::launch {
namespace {

constexpr int kLargestPort = 65535;

}  // namespace

void Options::validate() const {
  std::string wrong;
  auto note = [&](const std::string& problem) { wrong += (wrong.empty() ? "" : "; ") + problem; };
  auto at_least = [&](const std::optional<int>& value, int least, const char* name) {
    if (value && *value < least) note(base::str(name, " must be ", least, " or greater, not ", *value));
  };
  at_least(processes, 1, "-n");
  at_least(world_size, 1, "--world_size");
  at_least(nodes, 1, "--nnodes");
  at_least(base_rank, 0, "--base_rank");
  at_least(node_rank, 0, "--node_rank");
  at_least(restarts, 0, "--restarts");
  at_least(log_limit_mib, 1, "--log-limit");
  if (master_port && (*master_port < 1 || *master_port > kLargestPort)) {
    note(base::str("--master_port must be from 1 to ", kLargestPort, ", not ", *master_port));
  }
  if (master_address && master_address->empty()) note("--master_addr must name a host");
  if (grace.count() < 0) note(base::str("--grace-period must be 0 or greater, not ", grace.count()));
  if (hang_timeout && hang_timeout->count() < 1) {
    note(base::str("--hang-timeout must be 1 or greater, not ", hang_timeout->count()));
  }
  if (module && command) note("-m (a Python module) and -c (a program) exclude each other: give one of them");
  if (std::ranges::find(preload, "") != preload.end()) {
    note("--preload must name Python modules, with a comma between them, as in `--preload torch,lamina`");
  }
  if (target.empty() || target.front().empty()) note("say what to run, as in `lamina run -n 2 train.py`");
  if (!wrong.empty()) throw base::ConfigError(wrong);
}

}  // namespace lamina::launch
