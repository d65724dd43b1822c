// SPDX-License-Identifier: Apache-2.0
#include "lamina/launch/options/preparation.h"

#include "lamina/base/str.h"
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

}  // namespace

Preparation prepare(const Options& options) {
  options.validate();
  Preparation job{.options = options, .inherited = own_environment()};
  if (options.config_file) take_config(job);
  job.inherited = with_variables(std::move(job.inherited), options.variables, "-x");
  const environment::Environment environment = environment::process_environment();
  job.layout = find_layout(job.options, {environment, [&] { return visible_gpus(environment); }});
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
  job.program = find_program(job.options);
  return job;
}

}  // namespace lamina::launch
