// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/device_errors.h"

#include <algorithm>
#include <string>

#include "lamina/base/str.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/frontend/model.h"
#include "lamina/session/device_errors.h"

namespace lamina::frontend {
namespace {

constexpr auto kRank = "rank ";  // with which its lines begin
constexpr auto kModule = "in ";  // and names of modules

bool has(const c10::Error& error, const char* beginning) {
  return std::ranges::any_of(error.context(), [&](const std::string& line) { return line.starts_with(beginning); });
}

session::TensorsHeld held(const Current& job) {
  session::TensorsHeld held;
  if (job.model != nullptr && job.model->partitioned()) {
    held = session::tensors_of(job.model->table(), job.model->shared_sharding().get());
  }
  for (const auto& each : optimizers_of(job)) {
    for (const auto& member : each->lent.members()) {
      value::for_each_tensor(each->lent.state_of(member),
                             [&](const at::Tensor& state) { held.optimizer_states.push_back(state); });
    }
  }
  return held;
}

class ExplainingFailures : public value::Failures {
 public:
  value::Failure describe(std::exception_ptr error, base::Rank rank) override {
    try {
      explained([&] { std::rethrow_exception(error); });
    } catch (...) {  // which has more to say now
    }
    return Failures::describe(error, rank);
  }
};

}  // namespace

void explain(c10::OutOfMemoryError& error) {
  if (!has_current() || has(error, kRank)) return;
  const auto& job = current();
  error.add_context(session::told_of_full_memory(*job.session, held(job), ""));
}

void explain(c10::AcceleratorError& error) {
  if (!has_current() || has(error, kRank)) return;
  const auto line = session::told_of_failed_kernel(*current().session);
  if (!line.empty()) error.add_context(line);
}

void note_module(c10::OutOfMemoryError& error, const torch::nn::Module& module) {
  if (!has_current() || current().model == nullptr || has(error, kModule)) return;
  const auto& tree = current().model->tree();
  for (int node = 0; node < tree.size(); ++node) {
    if (tree.module(node).get() != &module) continue;
    const auto& name = tree.nodes()[node].name;
    return error.add_context(base::str(kModule, name.empty() ? "the model" : name));
  }
}

std::shared_ptr<value::Failures> explaining_failures() { return std::make_shared<ExplainingFailures>(); }

}  // namespace lamina::frontend
