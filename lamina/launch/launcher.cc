// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/launcher.h"

#include <fcntl.h>
#include <unistd.h>

#include <vector>

#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/launch/descendants.h"
#include "lamina/launch/environment.h"
#include "lamina/launch/error.h"
#include "lamina/launch/program.h"
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

Job describe(const Options& options, int port) {
  return {.master_port = port,
          .run_id = base::str("lamina-", ::getpid()),
          .world_size = options.processes,
          .local_world_size = options.processes,
          .cores = available_cores()};
}

std::vector<RankProcess> start_ranks(const Job& job, const Program& program, const std::vector<RankLog>& logs,
                                     const sigset_t& mask) {
  const Secret secret;
  const base::Fd null = open_null();
  // A background process group must not read the terminal.
  const int first_input = ::isatty(STDIN_FILENO) ? null.get() : STDIN_FILENO;
  const Environment inherited = own_environment();
  std::vector<RankProcess> ranks;
  for (int i = 0; i < job.local_world_size; ++i) {
    const base::Fd copy = secret.copy();
    const base::Rank rank(i);
    ranks.emplace_back(RankStart{
        .rank = rank,
        .program = program,
        .environment = rank_environment(job, {.rank = rank, .local_rank = i, .secret_fd = copy.get()}, inherited),
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
  options.validate();
  const Program program = find_program(options);
  const std::vector<RankLog> logs(options.processes - 1);
  const ReservedPort port;
  Signals signals;
  adopt_descendants();
  const Sweep sweep;
  const auto ranks = start_ranks(describe(options, port.number()), program, logs, signals.mask_before());
  const Report report(logs);
  return Supervisor(ranks, signals, report).run();
}

}  // namespace lamina::launch
