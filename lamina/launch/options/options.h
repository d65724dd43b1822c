// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "lamina/environment/host_port.h"
#include "lamina/launch/options/command_line.h"

namespace lamina::launch {

// Options of `lamina run`. What is not given comes from the environment or has a default, see Layout.
struct Options {
  // Places of the ranks.
  std::optional<int> processes;   // ranks to start on this machine
  std::optional<int> world_size;  // ranks of the whole job
  std::optional<int> nodes;       // machines, with as many ranks on each: another way to say world_size
  std::optional<int> base_rank;   // the first rank of this machine
  std::optional<int> node_rank;   // of this machine
  std::optional<std::string> master_address;
  std::optional<int> master_port;
  std::optional<environment::HostPort> witness;  // of the job; without a target this process is to be it
  std::optional<environment::HostPort> join;     // the job that the ranks of this machine join while it runs
  std::optional<int> join_port;                  // where launchers of newcomers ask this one; none: any free one

  // The program of each rank.
  bool module = false;                 // target[0] is a Python module (-m)
  bool command = false;                // target[0] is a program that needs no interpreter (-c)
  std::vector<std::string> variables;  // NAME=VALUE for all ranks, or NAME
  std::optional<std::string> config_file;
  std::optional<std::string> secret_file;
  std::vector<std::string> preload;  // Python modules that one process imports for all ranks, see Preloader
  std::vector<std::string> target;   // what to run, then its arguments

  // Output that is kept and shown.
  std::optional<std::string> output_pattern;  // file names for stdout of the ranks but the first, see FilePattern
  std::optional<std::string> error_pattern;   // and for stderr
  std::optional<std::string> timeline;        // a file for what the ranks do
  int log_limit_mib = 64;                     // of what each other rank writes is kept, where no file is named
  bool tee = false;
  bool verbose = false;

  // How it ends.
  std::chrono::seconds grace{30};  // between SIGTERM and SIGKILL
  int restarts = 0;
  std::optional<int> least;  // ranks without which the others are ended, where a signal ends one; none: all
  std::optional<int>
      most;  // ranks that there may be, where those that a signal ends are started again; none: they are not
  std::optional<std::chrono::seconds> join_every;  // ranks that are started by hand join at most so often
  std::optional<std::chrono::seconds> spare_wait;  // of newcomers for which there is no place
  std::optional<std::chrono::seconds> hang_timeout;

  // True of a command that starts no ranks: it is the witness of those that others start.
  bool is_witness() const { return witness && target.empty(); }

  // Throws ConfigError: one line that names every wrong field. Looks at no file and at no environment.
  void validate() const;
};

// Adds options of what is run, where its output goes and how it ends, for commands that hand them on to run_command().
void add_options_of_one_run(CLI::App& app, Options& options);

// Reads what follows `lamina run`, in the words of this launcher, of Composer's and of torchrun's. Returns an exit code
// as `parse` does, or nothing and fills `options`, not validated.
std::optional<int> parse_run(const Arguments& arguments, Options& options);

}  // namespace lamina::launch
