// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/model.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

#include "lamina/base/log.h"
#include "lamina/frontend/batch_norms.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/routing.h"
#include "lamina/frontend/travel.h"
#include "lamina/model/state_exchange.h"
#include "lamina/plan/configured.h"
#include "lamina/value/released.h"

namespace lamina::frontend {
namespace {

using topology::Group;

// What a rank says of its model before it is cut; what the first rank says counts.
Value statement(const std::string& description, const std::string& error, const std::string& table,
                const std::vector<int>& owners, const std::vector<int>& anywhere) {
  return to_value(std::tuple(description, error, table, owners, anywhere));
}

std::string first_difference(const std::string& first, const std::string& other) {
  std::istringstream expected(first), found(other);
  std::string a, b;
  while (true) {
    const bool more = static_cast<bool>(std::getline(expected, a)),
               and_more = static_cast<bool>(std::getline(found, b));
    if (!more && !and_more) return "";
    if (a != b || more != and_more) {
      return base::str(and_more ? b : "nothing", " instead of ", more ? a : "nothing");
    }
  }
}

// Nothing where the model throws: it will do so again in the step, whose error that is.
std::optional<std::vector<Cost>> traced(const ModuleTree& tree, const Example& example) {
  try {
    return trace(tree, example);
  } catch (const std::exception& error) {
    base::log_warning(
        base::str("the model could not be traced (", error.what(), "): it is cut by the bytes of its parameters"));
    return std::nullopt;
  }
}

// For whoever wonders why a Partition has no effect.
void tell_of_ignored_scopes(const ModuleTree& tree) {
  const auto count = std::ranges::count_if(tree.nodes(), [](const auto& node) {
    const Called* known = called(node.module.get());
    return known != nullptr && known->scope;
  });
  if (count == 0) return;
  base::log_warning(base::str(count,
                              " modules became a Child while a Partition lived, which auto_partition ignores: set "
                              "auto_partition to false, or place them by set_partition()"));
}

base::UsageError before_partition() {
  return base::UsageError(
      "the model is partitioned in the first step; nothing is local, and there is no report, before");
}

}  // namespace

Model::Model(std::shared_ptr<torch::nn::Module> root, ModelOptions options)
    : job_(outside_step("DistributedModel()")),
      options_(options),
      tree_(std::move(root)),
      partition_(static_cast<int>(job_.session->partition().value)),
      backward_watch_(options.average_grads_across_microbatches ? job_.session->config().microbatches : 1),
      noticed_(std::make_shared<const std::function<void()>>([this] { note_gradient(); })) {
  if (job_.model != nullptr) {
    throw base::UsageError("there is a DistributedModel already: a job has one; call shutdown() to begin another job");
  }
  if (options.backward_passes_per_step < 1 || !(options.bucket_cap_mb > 0)) {
    throw base::UsageError("backward_passes_per_step is at least 1, and bucket_cap_mb above 0");
  }
  make_reducer();
  if (!job_.pipelined()) cut(std::nullopt);
}

Model::~Model() = default;

int Model::owner_of(int node) const {
  if (!partitioned()) throw before_partition();
  return owners_[node];
}

const std::string& Model::report() const {
  if (!partitioned()) throw before_partition();
  return report_;
}

// Cutting.

std::vector<int> Model::agree(const std::optional<Example>& example) {
  auto& session = *job_.session;
  const std::string description = tree_.description();
  std::string error, table;
  std::vector<int> owners(tree_.size()), anywhere;
  if (session.world().rank == base::Rank(0)) {
    try {
      std::optional<std::vector<Cost>> costs;
      if (example) costs = traced(tree_, *example);
      const bool scopes_count = !session.config().auto_partition;
      if (!scopes_count) tell_of_ignored_scopes(tree_);
      auto [rows, nodes] = planned_tree(tree_, costs, scopes_count);
      if (session.world().size == 1) {  // whose partitions have become one
        for (auto& row : rows) row.placed_at.reset();
      }
      const auto report = plan::plan_for(session.config(), rows);
      table = plan::printed(rows, report, session.config());
      for (std::size_t row = 0; job_.pipelined() && row < nodes.size(); ++row) {
        owners[nodes[row]] = static_cast<int>(report.owners[row].value);
        if (rows[row].anywhere) anywhere.push_back(nodes[row]);
      }
    } catch (const std::exception& wrong) {
      error = wrong.what();
    }
  }
  const auto everyone = session.job().mailbox().all_gather(
      session.members(Group::kWorld), statement(description, error, table, owners, anywhere), session.patience());
  using Statement = std::tuple<std::string, std::string, std::string, std::vector<int>, std::vector<int>>;
  const auto first = from_value<Statement>(everyone.front());
  if (!std::get<1>(first).empty()) throw base::ConfigError(std::get<1>(first));
  for (std::size_t rank = 1; rank < everyone.size(); ++rank) {
    const auto different = first_difference(std::get<0>(first), std::get<0>(from_value<Statement>(everyone[rank])));
    if (different.empty()) continue;
    throw base::UsageError(base::str("rank ", rank, " built another model than rank 0: ", different));
  }
  report_ = std::get<2>(first);
  if (session.world().rank == base::Rank(0) && job_.pipelined()) std::fputs(report_.c_str(), stderr);
  anywhere_.assign(tree_.size(), false);
  for (const int node : std::get<4>(first)) anywhere_[node] = true;
  return std::get<3>(first);
}

void Model::cut(const std::optional<Example>& example) {
  owners_ = agree(example);
  give_values();
  let_go();
  for (const auto& weak : job_.trims) {
    if (const auto trim = weak.lock()) (*trim)([this](const at::Tensor& tensor) { return owns_tensor(tensor); });
  }
  if (job_.pipelined()) keep_order();
  watch();
  routing_ = std::make_shared<Routing>(tree_, owners_, anywhere_, *job_.session);
  set_router(routing_.get());
}

void Model::keep_order() {
  auto& job = job_.session->job();
  const auto statistics = batch_norms(*tree_.nodes().front().module);
  if (job_.session->config().deterministic_server) {
    remote::Tensors parameters;
    for (const auto& [name, tensor] : own(tree_.parameters())) parameters.push_back(tensor);
    const auto is_theirs = [&](const Held& buffer) {
      return std::ranges::any_of(statistics, [&](const runtime::BatchNorm& module) {
        return buffer.tensor.is_same(module.mean) || buffer.tensor.is_same(module.var) ||
               buffer.tensor.is_same(module.count);
      });
    };
    job.set_order(std::move(parameters), !std::ranges::all_of(tree_.buffers(), is_theirs));
  }
  std::vector<runtime::BatchNorm> here;
  std::ranges::copy_if(statistics, std::back_inserter(here),
                       [](const auto& module) { return !value::is_released(module.mean); });
  job.set_statistics(std::move(here));
}

bool Model::owns_tensor(const at::Tensor& tensor) const {
  for (const auto& held : tree_.parameters()) {
    if (held.tensor.is_same(tensor)) return owns(held);
  }
  return true;  // no business of the model's
}

void Model::give_values() {
  auto& session = *job_.session;
  if (session.world().size == 1) return;
  std::vector<model::Entry> entries;
  for (const auto& held : tree_.tensors()) entries.push_back({held.name, held.tensor, owns(held)});
  model::synchronize(entries, session.members(Group::kWorld), session.job().mailbox(), session.world().rank,
                     session.patience());
}

void Model::let_go() {
  for (auto& held : tree_.tensors()) {
    if (owns(held)) continue;
    const int owner = owner_of(held.node);
    value::release(
        held.tensor,
        base::str(held.name, " lives in partition ", owner, " on rank ", job_.session->owner(base::Partition(owner)),
                  "; it was used on rank ", job_.session->world().rank,
                  ": call its module as a lamina::Child, or place its user in the same partition with "
                  "set_partition. What concerns all parameters, such as an average or a penalty, is done between "
                  "steps: local_parameters() has those that are here, state_dict() all values on every rank"));
  }
}

}  // namespace lamina::frontend
