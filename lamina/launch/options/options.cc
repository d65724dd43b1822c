// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/options.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <functional>
#include <iostream>
#include <utility>
#include <vector>

#include "lamina/base/error.h"
#include "lamina/base/printable.h"
#include "lamina/base/str.h"
#include "lamina/base/whole_number.h"
#include "lamina/launch/options/machine.h"

namespace lamina::launch {
namespace {

constexpr int kLargestPort = 65535;

constexpr const char* kFooter =
    "What is not given is read from LOCAL_WORLD_SIZE, WORLD_SIZE, BASE_RANK, NODE_RANK, MASTER_ADDR and MASTER_PORT,\n"
    "else from Slurm or MPI. `~` and $NAME in the arguments of SCRIPT expand in the environment of each rank\n"
    "(\\$NAME does not).\n"
    "Words after SCRIPT are its own: options of `lamina run` come before it.\n"
    "Python is $LAMINA_PYTHON, else `python` beside this program, else `python3`.\n"
    "Local rank 0 writes to this terminal; of the others, the one that fails first has its last lines shown.\n"
    "Rank 0 reads this program's standard input, except from a terminal; the other ranks read nothing.\n"
    "Ctrl-C ends the ranks in order (SIGTERM, the grace period, SIGKILL); a second one ends them at once.\n"
    "The exit code is that of the rank that failed first, 128 + n after signal n; 2 for wrong arguments.";

// Throws CLI::ValidationError; `more` is said of what is no number.
int number_of(const std::string& option, const std::string& text, const std::string& more = "") {
  if (const auto number = base::whole_number(text)) return *number;
  if (base::beyond_int(text)) throw CLI::ValidationError(option, text + " is too large a number");
  throw CLI::ValidationError(option, text + " is not a whole number" + more);
}

CLI::Option* add_number(CLI::App& app, const std::string& names, const std::string& description,
                        const std::function<void(int)>& take) {
  const std::string name = names.substr(0, names.find(','));
  const auto read = [=](const std::string& text) { take(number_of(name, text)); };
  return app.add_option_function<std::string>(names, read, description);
}

// A whole number; or `gpu` and `auto`, torchrun's words for what no number means here, and `cpu` for one per core.
void take_processes(const std::string& text, Options& options) {
  if (text == "gpu" || text == "auto") return;
  options.processes = text == "cpu" ? environment::available_cores() : number_of("--nproc", text);
}

void take_nodes(const std::string& text, Options& options) {
  options.nodes = number_of("--nnodes", text, ": jobs here do not grow or shrink while they run");
}

void take_elastic(const std::string& text, Options& options) {
  const auto colon = text.find(':');
  const std::string more = "; write MIN or MIN:MAX, as in --elastic 2:4";
  options.least = number_of("--elastic", text.substr(0, colon), more);
  options.most.reset();
  if (colon != std::string::npos) options.most = number_of("--elastic", text.substr(colon + 1), more);
}

environment::HostPort read_place(const std::string& option, const std::string& text) {
  if (auto place = environment::HostPort::read(text)) return *place;
  throw CLI::ValidationError(option, text + " is no HOST:PORT, as in 10.0.0.3:29501");
}

void add_places(CLI::App& app, Options& options) {
  app.add_option_function<std::string>(
         "-n,--nproc,--nproc-per-node,--nproc_per_node",
         [&](const std::string& text) { take_processes(text, options); },
         "ranks to start on this machine (one per visible GPU, or one)")
      ->type_name("N");
  add_number(app, "--world_size,--world-size", "ranks of the whole job", [&](int number) {
    options.world_size = number;
  })->type_name("N");
  app.add_option_function<std::string>(
         "--nnodes", [&](const std::string& text) { take_nodes(text, options); }, "machines, each with as many ranks")
      ->type_name("N");
  add_number(app, "--base_rank,--base-rank", "first rank of this machine", [&](int number) {
    options.base_rank = number;
  })->type_name("R");
  add_number(app, "--node_rank,--node-rank", "which machine this is, from 0", [&](int number) {
    options.node_rank = number;
  })->type_name("R");
  app.add_option("--master_addr,--master-addr", options.master_address, "the machine of rank 0")->type_name("HOST");
  add_number(app, "--master_port,--master-port", "a free port there", [&](int number) {
    options.master_port = number;
  })->type_name("PORT");
  app.add_option_function<std::string>(
         "--witness", [&](const std::string& text) { options.witness = read_place("--witness", text); },
         "where the job's witness is, whose voice counts where machines are lost; without SCRIPT: be it")
      ->type_name("HOST:PORT");
  app.add_option_function<std::string>(
         "--join", [&](const std::string& text) { options.join = read_place("--join", text); },
         "have these ranks join an elastic job that runs; any of its launchers says HOST:PORT")
      ->type_name("HOST:PORT");
  add_number(app, "--join-port", "port at which this launcher tells others how to join its job (any free one)",
             [&](int number) { options.join_port = number; })
      ->type_name("PORT");
  app.add_flag("--standalone")->description("one machine (which is the default)");
}

void add_program(CLI::App& app, Options& options) {
  app.add_flag("-m,--module_mode,--module", options.module, "SCRIPT is a Python module");
  app.add_flag("-c,--command_mode,--no-python,--no_python", options.command,
               "SCRIPT is a program, started without Python");
  app.add_option("--preload", options.preload,
                 "modules that are imported once; the ranks are copies of the process that did so")
      ->type_name("MODULE,...")
      ->expected(1)
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("-x", options.variables, "a variable for all ranks (repeatable)")
      ->type_name("NAME=VALUE")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--config", options.config_file, "keys of lamina.init, or a `distribution` dictionary: JSON or YAML")
      ->type_name("FILE");
  app.add_option("--secret-file", options.secret_file, "32 bytes or more that the machines of the job share, mode 0600")
      ->type_name("FILE");
}

void add_outputs(CLI::App& app, Options& options) {
  app.add_option("--stdout", options.output_pattern,
                 "file for the output of each rank but the first here; takes {rank}, {local_rank}, {world_size}, "
                 "{node_rank}, {local_world_size}")
      ->type_name("PATTERN");
  app.add_option("--stderr", options.error_pattern, "the same for its errors")->type_name("PATTERN");
  add_number(app, "--log-limit", "MiB that are kept of what a rank writes to no named file, the last ones (64)",
             [&](int number) { options.log_limit_mib = number; })
      ->type_name("MIB");
  app.add_option("--timeline", options.timeline, "record what the ranks do: a trace that opens in Perfetto")
      ->type_name("FILE");
  app.add_flag("--tee", options.tee, "show the lines of all ranks, each with its rank in front");
  app.add_flag("-v,--verbose", options.verbose, "say what is started, and where");
}

void add_ends(CLI::App& app, Options& options) {
  add_number(app, "--grace-period,--grace_period", "seconds from SIGTERM to SIGKILL (30)", [&](int number) {
    options.grace = std::chrono::seconds(number);
  })->type_name("S");
  add_number(app, "--restarts,--max-restarts,--max_restarts", "how often the job is started again after a failure (0)",
             [&](int number) { options.restarts = number; })
      ->type_name("N");
  app.add_option_function<std::string>(
         "--elastic", [&](const std::string& text) { take_elastic(text, options); },
         "let the others go on where a signal ends a rank, while MIN are left (all); with MAX it is started again, and "
         "joins them, as others do (--join), so that there are at most so many")
      ->type_name("MIN[:MAX]");
  add_number(app, "--join-every", "ranks that are started by hand (--join) enter at most once in so many seconds (60)",
             [&](int number) { options.join_every = std::chrono::seconds(number); })
      ->type_name("S");
  add_number(app, "--spare-wait", "seconds that a rank which joins, and has no place, waits for one (3600)",
             [&](int number) { options.spare_wait = std::chrono::seconds(number); })
      ->type_name("S");
  add_number(app, "--hang-timeout,--hang_timeout",
             "end the job when, for so many seconds from its start on, no rank begins or ends a step of lamina (never)",
             [&](int number) { options.hang_timeout = std::chrono::seconds(number); })
      ->type_name("S");
}

using GivenOptions = std::vector<std::pair<bool, const char*>>;

// Lists those that are given of `first`, of the options that say where ranks are, and of `others`.
std::string given_of(const GivenOptions& first, const Options& options, const GivenOptions& others) {
  const GivenOptions places{
      {options.world_size.has_value(), "--world_size"},      {options.nodes.has_value(), "--nnodes"},
      {options.base_rank.has_value(), "--base_rank"},        {options.node_rank.has_value(), "--node_rank"},
      {options.master_address.has_value(), "--master_addr"}, {options.master_port.has_value(), "--master_port"}};
  std::string given;
  for (const auto* some : {&first, &places, &others}) {
    for (const auto& [is_given, name] : *some) {
      if (is_given) given += base::str(given.empty() ? "" : ", ", name);
    }
  }
  return given;
}

// The witness has a place, a secret, and nothing else.
void note_of_witness(const Options& options, const std::function<void(const std::string&)>& note) {
  const auto given = given_of({{options.processes.has_value(), "-n"}}, options,
                              {{options.config_file.has_value(), "--config"},
                               {!options.preload.empty(), "--preload"},
                               {options.module, "--module"},
                               {options.command, "--no-python"},
                               {options.least.has_value(), "--elastic"},
                               {options.restarts > 0, "--restarts"}});
  if (!given.empty()) {
    note(base::str("without SCRIPT, --witness is the witness itself, which has no ranks: leave out ", given,
                   ", or say what to run"));
  }
}

// Options that do not go with --join.
void note_beside_join(const Options& options, const std::function<void(const std::string&)>& note) {
  const auto given = given_of({}, options,
                              {{options.least.has_value(), "--elastic"},
                               {options.join_every.has_value(), "--join-every"},
                               {options.witness.has_value(), "--witness"},
                               {options.restarts > 0, "--restarts"}});
  if (!given.empty()) note(base::str("--join has the job that runs say where its ranks are: leave out ", given));
  if (!options.secret_file) note("--join needs --secret-file: the file that the launchers of the job have");
}

}  // namespace

void add_options_of_one_run(CLI::App& app, Options& options) {
  add_program(app, options);
  add_outputs(app, options);
  add_ends(app, options);
}

std::optional<int> parse_run(const Arguments& arguments, Options& options) {
  CLI::App app("Starts the ranks of a job on this machine, watches them, and ends all of them when one fails.",
               "lamina run");
  app.add_option("SCRIPT", options.target, "what to run; all words after it go to it")->type_name("ARGUMENTS");
  add_places(app, options);
  add_options_of_one_run(app, options);
  app.set_version_flag("--version", "lamina " LAMINA_VERSION);
  app.footer(kFooter);
  CommandLine line = split(app, arguments);
  for (const std::string& word : line.options) {
    if (!word.starts_with("--rdzv")) continue;
    std::cerr << "lamina run: " << base::printable_line(word.substr(0, word.find('=')))
              << ": there is no rendezvous service here; give every machine --nnodes, --node-rank, --master-addr and "
                 "--master-port\n";
    return 2;
  }
  if (auto code = parse(app, "lamina run", line.options)) return code;
  options.target = std::move(line.rest);
  return std::nullopt;
}

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
  at_least(least, 1, "--elastic");
  if (least && most && *most < *least) {
    note(base::str("--elastic ", *least, ":", *most, ": MAX must be MIN or greater"));
  }
  at_least(log_limit_mib, 1, "--log-limit");
  if (master_port && (*master_port < 1 || *master_port > kLargestPort)) {
    note(base::str("--master_port must be from 1 to ", kLargestPort, ", not ", *master_port));
  }
  if (master_address && master_address->empty()) note("--master_addr must name a host");
  if (join_port && (*join_port < 1 || *join_port > kLargestPort)) {
    note(base::str("--join-port must be from 1 to ", kLargestPort, ", not ", *join_port));
  }
  for (const auto& [span, name] : {std::pair{join_every, "--join-every"}, {spare_wait, "--spare-wait"}}) {
    if (span && span->count() < 0) note(base::str(name, " must be 0 or greater, not ", span->count()));
  }
  if (join) note_beside_join(*this, note);
  if (grace.count() < 0) note(base::str("--grace-period must be 0 or greater, not ", grace.count()));
  if (hang_timeout && hang_timeout->count() < 1) {
    note(base::str("--hang-timeout must be 1 or greater, not ", hang_timeout->count()));
  }
  if (module && command) note("-m (a Python module) and -c (a program) exclude each other: give one of them");
  if (std::ranges::find(preload, "") != preload.end()) {
    note("--preload must name Python modules, with a comma between them, as in `--preload torch,lamina`");
  }
  if (witness && !secret_file) {
    note(
        "--witness needs --secret-file, the same on all machines: by its secret the job and its witness know each "
        "other");
  }
  if (is_witness()) {
    note_of_witness(*this, note);
  } else if (witness && !least) {
    note("--witness is for jobs that go on without ranks that are lost: give --elastic, too");
  }
  if (!is_witness() && (target.empty() || target.front().empty()))
    note("say what to run, as in `lamina run -n 2 train.py`");
  if (!wrong.empty()) throw base::ConfigError(wrong);
}

}  // namespace lamina::launch
