// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace lamina::launch {

// A file with the keys of docs/configuration.md is the configuration of a job. A `distribution` dictionary says of it:
//   {"smdistributed": {"modelparallel": {"enabled": true, "parameters": {...}}},
//    "mpi": {"enabled": true, "processes_per_host": 8, "custom_mpi_options": "-x NAME=VALUE"}}
struct Distribution {
  std::optional<int> processes;           // mpi.processes_per_host
  std::optional<std::string> parameters;  // the configuration of lamina, JSON
  std::vector<std::string> variables;     // of -x in mpi.custom_mpi_options, NAME=VALUE
  std::vector<std::string> warnings;      // a line each: what has no effect here
};

// Reads the file: YAML if its name ends in .yaml or .yml, else JSON. The dictionary may stand under "distribution".
// Throws ConfigError: what cannot be read, is not known, or is no valid configuration.
Distribution read_distribution(const std::string& path);

}  // namespace lamina::launch
