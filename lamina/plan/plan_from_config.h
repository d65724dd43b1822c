// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lamina/config/config.h"
#include "lamina/plan/report.h"

namespace lamina::plan {

// The plan of `tree` that a job's configuration asks for: automatic, or as placed by hand. Throws as the planners do.
Report plan_for(const config::Config& config, const ModuleTree& tree);

// Returns it as text: the assignments in one line, then the table of describe().
std::string printed(const ModuleTree& tree, const Report& report, const config::Config& config);

}  // namespace lamina::plan
