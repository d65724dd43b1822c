// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/preparation.h"

#include <sys/random.h>

#include <algorithm>
#include <cstdint>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/base/whole_number.h"
#include "lamina/config/sources.h"
#include "lamina/launch/options/distribution.h"
#include "lamina/launch/options/file_pattern.h"
#include "lamina/launch/options/machine.h"
#include "lamina/launch/options/rank_environment.h"

namespace lamina::launch {
namespace {

// A file that the command names goes before what stands in the environment.
void drop_left_configuration(Preparation& job, const std::string& parameters) {
  const auto left = find(job.inherited, config::kOwnVariable);
  std::erase_if(job.inherited,
                [](const std::string& entry) { return entry.starts_with(base::str(config::kOwnVariable, "=")); });
  for (const auto& [name, value] : {std::pair{config::kOwnVariable, left},
                                    {config::kSageMakerVariable, find(job.inherited, config::kSageMakerVariable)}}) {
    if (!value || value->empty() || *value == parameters) continue;
    job.warnings.push_back(base::str("--config ", *job.options.config_file, " is the configuration: ", name,
                                     " of the environment has no effect"));
  }
}

// A flag on the command line goes before what the file says.
void take_config(Preparation& job) {
  const Distribution file = read_distribution(*job.options.config_file);
  if (!job.options.processes) job.options.processes = file.processes;
  std::vector<std::string> variables = file.variables;
  if (file.parameters) {
    variables.push_back(base::str(config::kSageMakerVariable, "=", *file.parameters));
    drop_left_configuration(job, *file.parameters);
  }
  job.inherited = with_variables(std::move(job.inherited), variables, "--config " + *job.options.config_file + ":");
  job.warnings.insert(job.warnings.end(), file.warnings.begin(), file.warnings.end());
}

// Says whether a word is the option `name`, perhaps with its value: "-n", "-n2", "--timeline=a.json".
bool is_option(const std::string& word, const std::string& name) {
  if (!word.starts_with(name)) return false;
  const auto rest = word.substr(name.size());
  return rest.empty() || rest.front() == '=' || (name.size() == 2 && base::whole_number(rest));
}

// Words after the script are the script's, also where they look like ours. Options that scripts often have too are left
// out; so is what was given before the script as well.
void tell_late_options(Preparation& job) {
  const Options& given = job.options;
  if (given.command) return;
  const bool counted = given.processes || given.world_size || given.nodes;
  const std::pair<bool, std::vector<std::string>> options[] = {
      {counted, {"-n", "--nproc", "--nproc-per-node", "--nproc_per_node", "--nnodes"}},
      {given.timeline.has_value(), {"--timeline"}},
      {!given.preload.empty(), {"--preload"}},
      {given.restarts > 0, {"--restarts", "--max-restarts", "--max_restarts"}},
      {given.hang_timeout.has_value(), {"--hang-timeout", "--hang_timeout"}},
      {given.tee, {"--tee"}}};
  const std::string& script = given.target.front();
  for (auto word = given.target.begin() + 1; word != given.target.end(); ++word) {
    for (const auto& [known, names] : options) {
      const bool late = !known && std::ranges::any_of(names, [&](const auto& name) { return is_option(*word, name); });
      if (!late) continue;
      const auto ranks = job.layout.world_size;
      job.warnings.push_back(base::str(*word, " comes after ", script, ", so it is for ", script, ", which runs on ",
                                       ranks, ranks == 1 ? " rank" : " ranks",
                                       "; options of `lamina run` come before it, as in `lamina run -n 2 ", script,
                                       "`"));
      return;
    }
  }
}

// Refuses an --elastic that does not go with the ranks that there are.
void check_elastic(const Options& options, const Layout& layout) {
  if (options.join) return;
  for (const auto& [given, name] :
       {std::pair{options.join_port.has_value(), "--join-port"}, {options.join_every.has_value(), "--join-every"}}) {
    if (!given || (options.most && options.secret_file)) continue;
    throw base::ConfigError(
        base::str(name, " is for jobs that others may join: it needs --elastic MIN:MAX and --secret-file"));
  }
  if (options.spare_wait && !options.most) {
    throw base::ConfigError("--spare-wait is for ranks that join a job: it needs --elastic MIN:MAX, or --join");
  }
  if (!options.least) return;
  const auto ranks = base::str("the ", layout.world_size, layout.world_size == 1 ? " rank" : " ranks", " of the job");
  if (*options.least > layout.world_size) {
    throw base::ConfigError(base::str("--elastic: MIN is ", *options.least, ", which is more than ", ranks));
  }
  if (!options.most) return;
  if (*options.most < layout.world_size) {
    throw base::ConfigError(base::str("--elastic: MAX is ", *options.most, ", which is less than ", ranks));
  }
  if (options.secret_file) return;
  if (layout.several_machines()) {
    throw base::ConfigError(
        "--elastic MIN:MAX on several machines needs --secret-file: by its secret the job knows a rank that comes "
        "back");
  }
  if (*options.most > layout.world_size) {
    throw base::ConfigError(base::str("--elastic: MAX is ", *options.most, ", which is more than ", ranks,
                                      ": others join it by `lamina run --join`, which needs --secret-file here, too"));
  }
}

// A number of a machine of its own: those that join do not know of each other.
int drawn_node() {
  std::uint32_t number = 0;
  if (::getrandom(&number, sizeof number, 0) != sizeof number) throw base::Error("no random numbers");
  return static_cast<int>(number >> 2U);
}

}  // namespace

Preparation prepare(const Options& options) {
  options.validate();
  Preparation job{.options = options, .inherited = own_environment()};
  leave_out_python(job.options);
  if (options.config_file) take_config(job);
  job.inherited = with_variables(std::move(job.inherited), options.variables, "-x");
  const environment::Environment environment = environment::process_environment();
  job.layout = find_layout(job.options, {environment, [&] { return visible_gpus(environment); }});
  check_elastic(job.options, job.layout);
  if (job.options.join) job.layout.node_rank = drawn_node();
  if (!job.layout.warning.empty()) job.warnings.push_back(job.layout.warning);
  for (const auto& [text, option] :
       {std::pair{options.output_pattern, "--stdout"}, {options.error_pattern, "--stderr"}}) {
    if (text && FilePattern(*text, option).shared(job.layout)) {
      job.warnings.push_back(base::str(option, " ", *text, " makes ranks share a file: put {rank} into it"));
    }
  }
  if (job.options.command && !job.options.preload.empty()) {
    job.warnings.push_back("ranks start without --preload: -c starts a program without Python");
    job.options.preload.clear();
  }
  tell_late_options(job);
  job.program = find_program(job.options);
  return job;
}

}  // namespace lamina::launch
