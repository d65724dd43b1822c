// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>

#include "lamina/plan/report.h"

namespace lamina::plan {

// The partition of each module by its name, of a model that was cut before: a checkpoint has one, and a file of the key
// `partition_file`.
using KeptPartition = std::map<std::string, int>;

// {"partition": {name: partition}}. Throws base::ConfigError, which names the file, for what is none.
KeptPartition read_partition(const std::string& path);
// Throws base::ConfigError where the file cannot be written.
void write_partition(const std::string& path, const ModuleTree& tree, const Assignment& owners);

// The owners that it says of a tree; none where it does not know a module, or has more partitions.
std::optional<Assignment> owners_of(const KeptPartition& kept, const ModuleTree& tree, int partitions);

}  // namespace lamina::plan
