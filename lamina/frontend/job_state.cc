// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/job_state.h"

#include <exception>
#include <unordered_map>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/frontend/model.h"
#include "lamina/messaging/agreement.h"

namespace lamina::frontend {

std::vector<session::NamesOf> named_state(const ModuleTree& tree) {
  std::vector<session::NamesOf> all;
  std::unordered_map<const void*, std::size_t> numbers;
  for (auto& [name, tensor] : tree.named()) {
    const auto [found, is_new] = numbers.emplace(tensor.unsafeGetTensorImpl(), all.size());
    if (is_new) all.push_back({{}, tensor});
    all[found->second].first.push_back(std::move(name));
  }
  return all;
}

std::vector<std::shared_ptr<JobOptimizer>> optimizers_of(const Current& job) {
  std::vector<std::shared_ptr<JobOptimizer>> all;
  for (const auto& each : job.optimizers) {
    if (auto optimizer = each.lock()) all.push_back(std::move(optimizer));
  }
  return all;
}

value::Value layout_of(const session::Session& session) {
  using topology::Group;
  const auto size = [&](Group group) { return static_cast<std::int64_t>(session.topology().size(group)); };
  return value::Dict{{{"pp", size(Group::kPp)},
                      {"rdp", size(Group::kRdp)},
                      {"sharded_data_parallel_degree", size(Group::kShard)},
                      {"tp", size(Group::kTp)},
                      {"world", static_cast<std::int64_t>(session.world().size)}}};
}

Model& require_model(const Current& job, const char* what) {
  if (job.model != nullptr) return *job.model;
  throw base::UsageError(base::str(what, ": there is no DistributedModel yet: make model and optimizers first"),
                         base::Code{"checkpoint-no-model"});
}

void together(session::Session& session, const std::function<void()>& act) {
  messaging::act_together(session.mailbox(), session.members(topology::Group::kWorld), act, session.patience());
}

}  // namespace lamina::frontend
