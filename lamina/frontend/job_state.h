// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lamina/frontend/current.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/frontend/module_tree.h"
#include "lamina/session/checkpoint_reader.h"

// A job's state under the names that checkpoints have for it.
namespace lamina::frontend {

// Each tensor of a model's state, with all its names.
std::vector<session::NamesOf> named_state(const ModuleTree& tree);

// The optimizers of the job that are still there.
std::vector<std::shared_ptr<JobOptimizer>> optimizers_of(const Current& job);

// How the ranks of a job share the work.
value::Value layout_of(const session::Session& session);

// Throws base::UsageError where the job has no model yet; `what` asks for it.
Model& require_model(const Current& job, const char* what);

// Does it on this rank, as all ranks do; then throws what failed on one of them, the first, on all. Collective over the
// world.
void together(session::Session& session, const std::function<void()>& act);

}  // namespace lamina::frontend
