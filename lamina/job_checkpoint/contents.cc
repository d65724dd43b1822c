// SPDX-License-Identifier: Apache-2.0
#include "lamina/job_checkpoint/contents.h"

#include <algorithm>
#include <ctime>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/faces/sayings.h"
#include "lamina/job_checkpoint/optimizer_states.h"
#include "lamina/model/values.h"

namespace lamina::job_checkpoint {
namespace {

std::string now() {
  const auto time = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%FT%T+00:00", &parts);
  return text;
}

value::Value to_value(const std::vector<GroupNames>& all) {
  value::List optimizers;
  for (const auto& groups : all) {
    value::List by_group;
    for (const auto& names : groups) {
      by_group.items.emplace_back(value::List{std::vector<value::Value>(names.begin(), names.end())});
    }
    optimizers.items.emplace_back(std::move(by_group));
  }
  return optimizers;
}

std::vector<GroupNames> to_names(const value::Value& told) {
  std::vector<GroupNames> all;
  for (const auto& optimizer : told.as<value::List>().items) {
    auto& groups = all.emplace_back();
    for (const auto& group : optimizer.as<value::List>().items) {
      auto& names = groups.emplace_back();
      for (const auto& name : group.as<value::List>().items) names.push_back(name.as<std::string>());
    }
  }
  return all;
}

// The names in the groups of a whole optimizer, from what each rank of a copy of the model knows of them. They are in
// the order of the model where each has made groups of its own parameters.
GroupNames agreed(const std::vector<GroupNames>& everyone, std::span<const std::string> rows) {
  if (std::ranges::all_of(everyone, [&](const GroupNames& other) { return other == everyone.front(); })) {
    return everyone.front();
  }
  std::unordered_map<std::string_view, std::size_t> order;
  for (const auto& row : rows) order.emplace(row, order.size());
  const auto place = [&](const std::string& name) {
    const auto found = order.find(name);
    return found == order.end() ? order.size() : found->second;
  };
  GroupNames merged(everyone.front().size());
  for (const auto& other : everyone) {
    if (other.size() != merged.size()) {
      throw faces::refusal("groups-apart", merged.size(), other.size());
    }
    for (std::size_t i = 0; i < merged.size(); ++i) {
      for (const auto& name : other[i]) {
        if (std::ranges::find(merged[i], name) == merged[i].end()) merged[i].push_back(name);
      }
    }
  }
  for (auto& names : merged) std::ranges::stable_sort(names, {}, place);
  return merged;
}

}  // namespace

About about_of(const JobAccess& job) {
  About about{.lamina = LAMINA_VERSION, .saved_at = now()};
  about.layout = JobLayout::of(job.ranks().topology);
  about.partition = job.partition();
  about.seeded_steps = job.steps().seeds().steps();
  if (const auto* scale = job.loss_scale(); scale != nullptr && scale->is_dynamic()) about.loss_scale = scale->state();
  return about;
}

std::vector<std::string> rows_of(const model::ParameterTable& table) {
  std::vector<std::string> rows;
  for (const auto& row : table.all()) rows.push_back(row.layout.name);
  return rows;
}

namespace {

// Gives the groups of each optimizer the names of the whole one. `known`: what each rank of a copy knows of them.
void name_groups(std::vector<OptimizerAbout>& optimizers, const std::vector<std::vector<GroupNames>>& known,
                 std::span<const std::string> rows) {
  for (std::size_t number = 0; number < optimizers.size(); ++number) {
    std::vector<GroupNames> everyone;
    for (const auto& rank : known) everyone.push_back(rank.at(number));
    const auto names = agreed(everyone, rows);
    auto& groups = optimizers[number].groups;
    for (std::size_t i = 0; i < groups.size(); ++i) groups[i].parameters = names[i];
  }
}

GroupNames names_in(const OptimizerAbout& optimizer) {
  GroupNames names;
  for (const auto& group : optimizer.groups) names.push_back(group.parameters);
  return names;
}

}  // namespace

About about_of_copy(const std::vector<About>& ranks, std::span<const std::string> rows) {
  auto about = ranks.front();
  value::Dict extra;
  for (const auto& each : ranks) {
    const auto* states = each.extra_state.get_if<value::Dict>();
    if (states != nullptr) extra.items.insert(extra.items.end(), states->items.begin(), states->items.end());
  }
  if (!extra.items.empty()) about.extra_state = std::move(extra);
  std::vector<std::vector<GroupNames>> known;
  for (const auto& each : ranks) {
    auto& names = known.emplace_back();
    for (const auto& optimizer : each.optimizers) names.push_back(names_in(optimizer));
  }
  name_groups(about.optimizers, known, rows);
  return about;
}

Contents::Contents(JobAccess& job, Of of, SaveList::Has has)
    : job_(job), of_(of), parts_(job.ranks(), job.table()), list_(parts_, has) {}

void Contents::collect() {
  add_model();
  extra_ = job_.extra_states();
  if (of_ == Of::kModel) return;
  for (auto* optimizer : job_.optimizers()) {
    add_states(static_cast<int>(optimizers_.size()), *optimizer, list_);
    optimizers_.push_back(about_of(*optimizer));
    names_.push_back(names_in(optimizers_.back()));
  }
}

void Contents::hand_in() {
  const auto pipeline = job_.ranks().pipeline();
  if (pipeline.size() == 1 || pipeline.front() != job_.ranks().everyone().front()) return;
  std::vector<model::NamedValue> own;
  own.emplace_back("extra", extra_);
  own.emplace_back("names", to_value(names_));
  for (const auto& [what, told] :
       model::gather(std::move(own), /*to_first=*/true, pipeline, job_.ranks().mailbox, job_.ranks().patience())) {
    if (what == "names") {
      known_.push_back(to_names(told));
    } else {
      const auto& states = told.as<value::Dict>().items;
      all_extra_.items.insert(all_extra_.items.end(), states.begin(), states.end());
    }
  }
}

About Contents::describe() {
  if (known_.empty()) {
    known_ = {names_};
    all_extra_ = extra_;
  }
  name_groups(optimizers_, known_, rows_of(job_.table()));
  auto about = about_of(job_);
  about.optimizers = std::move(optimizers_);
  if (!all_extra_.items.empty()) about.extra_state = all_extra_;
  return about;
}

void Contents::add_model() {
  for (auto& [names, tensor] : job_.model_state()) {
    const auto* row = parts_.table().find(tensor);
    if (row == nullptr) {
      checkpoint::savable_dtype(tensor, names.front());
      continue;
    }
    if (!parts_.table().is_here(*row)) continue;
    std::erase(names, row->layout.name);
    list_.add_row(row->layout.name, held_here(job_, tensor), names);
  }
}

}  // namespace lamina::job_checkpoint
