// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/launcher.h"

#include <fcntl.h>
#include <unistd.h>

#include <map>
#include <optional>
#include <vector>

#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/launch/descendants.h"
#include "lamina/launch/environment.h"
#include "lamina/launch/error.h"
#include "lamina/launch/preparation.h"
#include "lamina/launch/rank_log.h"
#include "lamina/launch/rank_process.h"
#include "lamina/launch/report.h"
#include "lamina/launch/reserved_port.h"
#include "lamina/launch/secret.h"
#include "lamina/launch/signals.h"
#include "lamina/launch/supervisor.h"

namespace lamina::launch {
namespace {

constexpr std::chrono::seconds kSweepLimit{2};

// Ends whatever the ranks left, also when their start failed half-way.
struct Sweep {
  ~Sweep() {
    if (!end_descendants(base::Deadline::after(kSweepLimit))) base::log_warning("some processes could not be killed");
  }
};

base::Fd open_null() {
  base::Fd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  if (!null) throw StartError("cannot open /dev/null: " + system_words());
  return null;
}

// The launchers of several machines cannot ask each other: they name the job by where its ranks meet.
std::string run_id(const Layout& layout) {
  if (!layout.several_machines()) return base::str("lamina-", ::getpid());
  return base::str("lamina-", layout.master_address, "-", *layout.master_port);
}

Job describe(const Layout& layout, int port) {
  return {.master_address = layout.master_address,
          .master_port = port,
          .run_id = run_id(layout),
          .world_size = layout.world_size,
          .local_world_size = layout.processes,
          .node_rank = layout.node_rank,
          .nodes = layout.nodes,
          .cores = available_cores()};
}

std::map<base::Rank, const RankLog*> by_rank(const std::vector<RankLog>& logs, int first) {
  std::map<base::Rank, const RankLog*> result;
  for (const RankLog& log : logs) result.emplace(first++, &log);
  return result;
}

// Without a shared file, ranks on several machines take a secret from rank 0, as they do under other launchers.
std::optional<Secret> find_secret(const Preparation& prepared) {
  if (prepared.options.secret_file) return Secret(*prepared.options.secret_file);
  if (prepared.layout.several_machines()) return {};
  return Secret();
}

std::vector<RankProcess> start_ranks(const Preparation& prepared, const Job& job, const std::vector<RankLog>& logs,
                                     const sigset_t& mask) {
  const auto secret = find_secret(prepared);
  const base::Fd null = open_null();
  // A background process group must not read the terminal.
  const int first_input = ::isatty(STDIN_FILENO) ? null.get() : STDIN_FILENO;
  std::vector<RankProcess> ranks;
  for (int i = 0; i < job.local_world_size; ++i) {
    const base::Fd copy = secret ? secret->copy() : base::Fd();
    const base::Rank rank(prepared.layout.base_rank + i);
    auto environment =
        rank_environment(job, {.rank = rank, .local_rank = i, .secret_fd = copy.get()}, prepared.environment);
    Program program = prepared.program.for_rank(environment);
    ranks.emplace_back(RankStart{.rank = rank,
                                 .program = program,
                                 .environment = std::move(environment),
                                 .input = i == 0 ? first_input : null.get(),
                                 .output = i == 0 ? STDOUT_FILENO : logs[i - 1].fd(),
                                 .error = i == 0 ? STDERR_FILENO : logs[i - 1].fd(),
                                 .secret = copy.get(),
                                 .signal_mask = mask});
  }
  return ranks;
}

}  // namespace

int launch(const Options& options) {
  const Preparation prepared = prepare(options);
  const std::vector<RankLog> logs(prepared.layout.processes - 1);
  const Report report(by_rank(logs, prepared.layout.base_rank + 1));
  for (const auto& warning : prepared.warnings) report.warn(warning);
  std::optional<ReservedPort> port;
  if (!prepared.layout.master_port) port.emplace();
  Signals signals;
  adopt_descendants();
  const Sweep sweep;
  const Job job = describe(prepared.layout, port ? port->number() : *prepared.layout.master_port);
  const auto ranks = start_ranks(prepared, job, logs, signals.mask_before());
  return Supervisor(ranks, signals, report).run();
}

}  // namespace lamina::launch
