// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/config/config.h"
#include "lamina/plan/kept_partition.h"
#include "lamina/plan/report.h"

namespace lamina::plan {

// The plan of `tree` that a job's configuration asks for: automatic, or as placed by hand; or as it was, where `kept`
// is of this tree and as many partitions. With `load_partition` it is as in `partition_file`; else that is written,
// where there is one. Throws as the planners do, and base::ConfigError for a file that does not fit.
Report plan_for(const config::Config& config, const ModuleTree& tree, const KeptPartition& kept = {});

// Returns it as text: the assignments in one line, then the table of describe().
std::string printed(const ModuleTree& tree, const Report& report, const config::Config& config);

}  // namespace lamina::plan
