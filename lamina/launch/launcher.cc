// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/launcher.h"

#include <unistd.h>

#include <chrono>
#include <iostream>
#include <optional>
#include <thread>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"
#include "lamina/environment/address.h"
#include "lamina/environment/job_door.h"
#include "lamina/launch/options/machine.h"
#include "lamina/launch/options/options.h"
#include "lamina/launch/options/preparation.h"
#include "lamina/launch/options/rank_environment.h"
#include "lamina/launch/ranks/attempt.h"
#include "lamina/launch/ranks/descendants.h"
#include "lamina/launch/ranks/doorkeeper.h"
#include "lamina/launch/ranks/error.h"
#include "lamina/launch/ranks/guardian.h"
#include "lamina/launch/ranks/watch.h"
#include "lamina/launch/reserved_port.h"
#include "lamina/launch/timeline_folder.h"
#include "lamina/launch/witness.h"

namespace lamina::launch {
namespace {

// A job that has just been started may take a moment until it listens.
constexpr std::chrono::seconds kAnswers{10}, kAnswer{2};
constexpr std::chrono::milliseconds kAsksAgain{200};

int complain(const std::exception& error, int code) {
  std::cerr << "lamina run: " << base::printable(error.what()) << '\n';
  return code;
}

// The launchers of several machines cannot ask each other: they name the job by where its ranks meet.
std::string run_id(const Layout& layout) {
  if (!layout.several_machines()) return base::str("lamina-", ::getpid());
  return base::str("lamina-", layout.master_address, "-", *layout.master_port);
}

Job describe(const Preparation& prepared, const std::optional<ReservedPort>& port) {
  const Layout& layout = prepared.layout;
  return {.master_address = port ? port->master() : layout.master_address,
          .master_port = port ? port->number() : *layout.master_port,
          .run_id = run_id(layout),
          .world_size = layout.world_size,
          .local_world_size = layout.processes,
          .node_rank = layout.node_rank,
          .nodes = layout.nodes,
          .cores = environment::available_cores(),
          .restarts = prepared.options.restarts,
          .least = prepared.options.least,
          .most = prepared.options.most,
          .join_every = prepared.options.join_every,
          .spare_wait = prepared.options.spare_wait,
          .witness = prepared.options.witness ? prepared.options.witness->text() : "",
          .stacks = prepared.options.hang_timeout.has_value() || prepared.options.least.has_value()};
}

// Only where rank 0 is to listen there.
void refuse_taken_port(const Layout& layout) {
  if (layout.base_rank != 0 || !is_taken(layout.master_address, *layout.master_port)) return;
  throw base::ConfigError(base::str("port ", *layout.master_port, " of ", layout.master_address,
                                    " is in use already: give another --master_port, or end what listens there"),
                          base::Code{"run-port"});
}

// Without a shared file, ranks on several machines take a secret from rank 0, as they do under other launchers.
std::optional<Secret> find_secret(const Preparation& prepared) {
  if (prepared.options.secret_file) return Secret(*prepared.options.secret_file);
  if (prepared.layout.several_machines()) return {};
  return Secret();
}

// The job at that address, and the address of the launcher that has answered. Throws base::PeerError.
std::pair<environment::JobDoor, environment::Address> ask(const environment::HostPort& join) {
  std::string why;
  for (const auto& address : join.addresses("--join")) {
    try {
      return {environment::ask_launcher(address.text(), base::Deadline::after(kAnswer)), address};
    } catch (const base::PeerError& error) {
      why = error.what();
    }
  }
  throw base::PeerError(why);
}

// Takes the terms of the job that runs, so that what is wrong is told before any rank starts.
environment::JobDoor find_job(Preparation& prepared) {
  auto& join = *prepared.options.join;
  const auto named = base::str("--join ", join.text(), ": ");
  const auto by = base::Deadline::after(kAnswers);
  while (true) {
    try {
      const auto [job, address] = ask(join);
      if (job.is_over) throw base::ConfigError(named + "the training of this job is over");
      prepared.options.least = job.terms.least;
      prepared.options.most = job.terms.most;
      prepared.options.join_every = job.terms.join_every;
      join.host = address.host();
      return job;
    } catch (const base::PeerError& error) {
      if (by.expired()) {
        throw base::ConfigError(base::str(named, "no job that others may join was found within ", kAnswers.count(),
                                          " s (", error.what(), "): its launchers, which have --elastic MIN:MAX and ",
                                          "--secret-file, say where they listen"));
      }
    }
    std::this_thread::sleep_for(kAsksAgain);
  }
}

// An exit code when an order came before the time was over.
std::optional<int> pause(std::chrono::milliseconds span, ControlPipe& control) {
  const auto deadline = base::Deadline::after(span);
  while (!deadline.expired()) {
    Watch watch;
    watch.add(control.fd(), POLLIN, [] {});
    watch.until(deadline);
    watch.wait();
    if (const auto signal = control.next()) return 128 + *signal;
    if (control.abandoned()) return 128 + SIGKILL;
  }
  return {};
}

// Our output waits for its reader, as any program's does.
void show_rest(Terminal& terminal, ControlPipe& control) {
  while (terminal.waiting() && !control.next() && !control.abandoned()) {
    Watch watch;
    terminal.watch(watch);
    watch.add(control.fd(), POLLIN, [] {});
    watch.wait();
  }
}

// Nothing of the ranks is left, and they will not be started again.
void after_all_ended(const Report& report, const Outcome& last, Terminal& terminal, ControlPipe& control) {
  if (last.again) report.keep_logs();
  show_rest(terminal, control);
}

// In the guardian: starts the job until it is over.
int run_job(const Preparation& prepared, Job job, const std::optional<Secret>& secret, RankOutputs& outputs,
            ControlPipe& control, const sigset_t& mask) {
  Signals children({SIGCHLD});
  adopt_descendants();
  Terminal terminal;
  const Report report(terminal, outputs, nullptr, prepared.options.verbose);
  for (const auto& warning : prepared.warnings) report.warn(warning);
  std::optional<Doorkeeper> doorkeeper;
  if (job.most) {
    job.doorkeeper = doorkeeper.emplace(prepared, job.witness).address();
    if (!job.doorkeeper.empty()) report.may_be_joined(job.doorkeeper);
  }
  std::optional<Preloader> preloader;
  if (!prepared.options.preload.empty()) {
    if (const auto code = preloader.emplace(prepared, job, mask, report).load(control)) return *code;
  }
  Preloader* const one = preloader ? &*preloader : nullptr;
  const Doorkeeper* const keeper = doorkeeper ? &*doorkeeper : nullptr;
  Restarts restarts(prepared.options.restarts);
  while (true) {
    const auto begin = base::Clock::now();
    job.restart = restarts.count();
    const Outcome outcome =
        Attempt{prepared, job, secret, terminal, outputs, one, keeper, control, children, mask}.run();
    const auto next = restarts.judge(outcome, base::Clock::now() - begin);
    if (next == Restarts::Next::kAgain) {
      report.restarting(restarts.count(), restarts.most(), restarts.pause());
      if (const auto code = pause(restarts.pause(), control)) return *code;
      continue;
    }
    if (next == Restarts::Next::kHopeless) report.giving_up(Restarts::kQuick);
    after_all_ended(report, outcome, terminal, control);
    return outcome.exit_code;
  }
}

// Throws ConfigError (nothing was started) and StartError.
int launch(const Options& options) {
  Preparation prepared = prepare(options);
  std::optional<environment::JobDoor> joined;
  if (prepared.options.join) joined = find_job(prepared);
  RankOutputs outputs(prepared);
  const auto secret = find_secret(prepared);
  std::optional<ReservedPort> port;
  if (prepared.layout.master_port) {
    refuse_taken_port(prepared.layout);
  } else {
    port.emplace(prepared.layout.master_address);
  }
  Job job = describe(prepared, port);
  if (joined) job.witness = joined->witness;
  return with_guardian([&](ControlPipe& control, const sigset_t& mask) {
    try {
      return run_job(prepared, job, secret, outputs, control, mask);
    } catch (const StartError& error) {
      return complain(error, kCannotStart);
    } catch (const base::ConfigError& error) {  // of --preload
      return complain(error, 2);
    }
  });
}

// The file never costs a job its exit code.
int launch_recorded(Options options) {
  TimelineFolder folder(*options.timeline);
  options.variables.push_back(folder.variable());
  const int code = launch(options);
  try {
    const std::string summary = folder.finish();
    std::cerr << (summary.empty() ? "lamina run: no rank has recorded a step: there is no timeline\n"
                                  : base::printable(summary));
  } catch (const base::Error& error) {
    complain(error, code);
  }
  return code;
}

}  // namespace

int run_command(const std::vector<std::string>& arguments) {
  Options options;
  if (auto code = parse_run(arguments, options)) return *code;
  try {
    if (options.is_witness()) return run_witness(options);
    return options.timeline ? launch_recorded(std::move(options)) : launch(options);
  } catch (const base::ConfigError& error) {
    return complain(error, 2);
  } catch (const StartError& error) {
    return complain(error, kCannotStart);
  }
}

}  // namespace lamina::launch
