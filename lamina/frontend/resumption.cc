// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/resumption.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GradMode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <algorithm>
#include <set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/checkpoint/tree_json.h"
#include "lamina/frontend/fused_optimizer.h"
#include "lamina/frontend/model.h"

namespace lamina::frontend {
namespace {

using archive::Kind;
using value::Value;

constexpr const char* kParameters = "params";
constexpr const char* kCount = "step";  // of updates: a number in C++, a tensor in Python's torch

// The value of a key; none where there is none.
const Value& at(const value::Dict& dict, const std::string& key) {
  static const Value none;
  for (const auto& [name, held] : dict.items) {
    const auto* text = name.get_if<std::string>();
    if (text != nullptr && *text == key) return held;
  }
  return none;
}

base::UsageError misfit(const std::string& what) { return base::UsageError(what, base::Code{"checkpoint-optimizers"}); }

bool counts_in_numbers(const torch::optim::Optimizer& optimizer) {
  namespace optim = torch::optim;
  return dynamic_cast<const optim::Adam*>(&optimizer) != nullptr ||
         dynamic_cast<const optim::AdamW*>(&optimizer) != nullptr ||
         dynamic_cast<const optim::Adagrad*>(&optimizer) != nullptr ||
         dynamic_cast<const optim::RMSprop*>(&optimizer) != nullptr;
}

// True where the optimizer has a number of that name, which others have as a tensor.
bool is_number_in(const torch::optim::Optimizer& optimizer, const std::string& key) {
  const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
  if (fused == nullptr) return key == kCount && counts_in_numbers(optimizer);
  return std::ranges::any_of(fused->functional().declaration().states,
                             [&](const auto& field) { return field.name == key && fused::is_number(field.kind); });
}

// A number as the optimizer has it in its states.
c10::IValue number_for(const torch::optim::Optimizer& optimizer, const std::string& key, const at::Tensor& saved) {
  if (saved.numel() == 0) return {};
  if (dynamic_cast<const FusedOptimizer*>(&optimizer) != nullptr) return saved.to(at::kDouble).item<double>();
  if (key == kCount && counts_in_numbers(optimizer)) return saved.to(at::kLong).item<std::int64_t>();
  return saved.item();
}

// A field of a state from its saved name and value.
std::pair<std::string, c10::IValue> field_of(const torch::optim::Optimizer& optimizer, std::string key,
                                             const at::Tensor& place, const at::Tensor& saved) {
  const bool is_marked = key.ends_with(kNumberMark);
  if (is_marked) key.pop_back();
  if (is_marked || (saved.dim() == 0 && is_number_in(optimizer, key))) return {key, number_for(optimizer, key, saved)};
  const bool is_like = saved.dim() > 0 && saved.sizes() == place.sizes();
  return {key, is_like ? saved.to(place.scalar_type()) : saved};
}

// The options of a group here, with the values that were saved.
Fields options_of(const torch::optim::Optimizer& optimizer, const Fields& own, const value::Dict& saved,
                  const std::string& group) {
  const bool has_presets = dynamic_cast<const FusedOptimizer*>(&optimizer) != nullptr;
  Fields options;
  for (const auto& [name, value] : own) {
    auto found = to_ivalue(at(saved, name));
    if (found.isNone() && has_presets) continue;
    if (found.isNone() && !value.isNone()) {
      throw misfit(base::str(group, " has the option ", name,
                             " here, which the checkpoint has no value of: it is of "
                             "another optimizer, or of one of Python's; leave its states with load_optimizer = false"));
    }
    options[name] = value.isDouble() && found.isInt() ? c10::IValue(static_cast<double>(found.toInt())) : found;
  }
  return options;
}

std::vector<std::string> parameters_of(const value::Dict& group) {
  std::vector<std::string> names;
  for (const auto& name : at(group, kParameters).as<value::List>().items) names.push_back(name.as<std::string>());
  return names;
}

}  // namespace

plan::KeptPartition Resumption::partition() const {
  const auto layout = reader_->about("layout", false), saved = reader_->about("partition", false);
  const auto* sizes = layout.get_if<value::Dict>();
  const auto* modules = saved.get_if<value::Dict>();
  if (sizes == nullptr || modules == nullptr) return {};
  const auto* partitions = at(*sizes, "pp").get_if<std::int64_t>();
  if (partitions == nullptr || *partitions != job_.session->topology().size(topology::Group::kPp)) return {};
  plan::KeptPartition kept;
  for (const auto& [name, number] : modules->items) {
    kept[name.as<std::string>()] = static_cast<int>(number.as<std::int64_t>());
  }
  return kept;
}

std::vector<value::Dict> Resumption::saved_optimizers() const {
  const auto about = reader_->about("optimizers", false);
  std::vector<value::Dict> all;
  if (const auto* list = about.get_if<value::List>()) {
    for (const auto& each : list->items) all.push_back(each.as<value::Dict>());
  }
  return all;
}

void Resumption::check() const {
  const auto left_out = reader_->check_model(named_state(job_.model->tree()), strict_);
  if (!left_out.empty() && job_.session->world().rank == base::Rank(0)) base::log_warning(left_out);
  if (load_optimizer_) check_optimizers();
}

void Resumption::check_optimizers() const {
  const auto saved = saved_optimizers();
  const auto here = optimizers_of(job_);
  if (saved.size() != here.size()) {
    throw misfit(base::str("the checkpoint has the states of ", saved.size(), " optimizers, and there are ",
                           here.size(),
                           " here: make them before resume_from_checkpoint(), or give load_optimizer = false"));
  }
  for (std::size_t number = 0; number < here.size(); ++number) {
    const auto who = base::str("optimizer ", number);
    const auto own = class_name(*here[number]->optimizer), theirs = at(saved[number], "class").as<std::string>();
    if (strict_ && own != theirs)
      throw misfit(
          base::str(who, " is of the class ", own, " here and ", theirs,
                    " in the checkpoint: make one of that class, or give strict = false, where the states are alike, "
                    "or load_optimizer = false"));
    const auto names = here[number]->members();
    const auto& groups = at(saved[number], "groups").as<value::List>().items;
    if (groups.size() != names.size()) {
      throw misfit(
          base::str(who, " has ", names.size(), " parameter groups here and ", groups.size(), " in the checkpoint"));
    }
    const auto options = here[number]->lent.options_of_groups();
    for (std::size_t i = 0; i < names.size(); ++i) {
      const auto group = base::str("group ", i, " of ", who);
      const auto& described = groups[i].as<value::Dict>();
      options_of(*here[number]->optimizer, options[i], described, group);
      const auto parameters = parameters_of(described);
      std::set<std::string> mine;
      for (const auto& member : names[i]) mine.insert(member.name);
      const std::set<std::string> given(parameters.begin(), parameters.end());
      if (strict_ && mine != given) {
        std::vector<std::string> other;
        std::ranges::set_symmetric_difference(mine, given, std::back_inserter(other));
        throw misfit(base::str(group, " has other parameters than in the checkpoint: ", other.front(),
                               other.size() > 1 ? base::str(" and ", other.size() - 1, " more") : ""));
      }
    }
  }
}

void Resumption::load() {
  auto& session = *job_.session;
  for (const auto& optimizer : optimizers_of(job_)) optimizer->replace_new();
  Plan plan;
  together(session, [&] {
    check();
    plan = planned();
  });
  together(session, [&] { reader_->read(session); });  // [Note: two reads]
  auto* sharding = job_.model->sharding();
  if (sharding != nullptr) sharding->before_update();
  together(session, [&] { reader_->fill_model(session); });
  if (sharding != nullptr) sharding->after_update();
  for (const auto& optimizer : optimizers_of(job_)) optimizer->engine.follow();
  together(session, [&] { reader_->fill_optimizers(session); });
  apply(std::move(plan));
}

Resumption::Plan Resumption::planned() {
  auto& model = *job_.model;
  const session::CheckpointParts parts(*job_.session, model.table());
  for (const auto& [names, tensor] : named_state(model.tree())) {
    const auto& row = *model.table().find(tensor);
    const auto* saved = reader_->saved_name(names);
    if (!model.table().is_here(row) || saved == nullptr) continue;
    if (*saved != row.layout.name) {
      throw base::UsageError(
          base::str(row.layout.name, " is tied, and saved as ", *saved, ", which is another tensor here"),
          base::Code{"checkpoint-names"});
    }
    const auto [kind, optimizer] = reader_->best_source(*saved, tensor.scalar_type());
    reader_->want_row(parts, *saved, kind, optimizer, model.held_here(tensor));
  }
  Plan plan;
  if (!load_optimizer_) return plan;
  int number = 0;
  for (const auto& optimizer : optimizers_of(job_)) plan.push_back(planned(number++, optimizer, parts));
  return plan;
}

Resumption::Planned Resumption::planned(int number, const std::shared_ptr<JobOptimizer>& optimizer,
                                        const session::CheckpointParts& parts) {
  Planned plan{.optimizer = optimizer};
  std::map<std::string, std::vector<std::string>> keys;
  for (const auto& saved : reader_->manifest().tensors) {
    if (saved.kind == Kind::kState && saved.optimizer == number) keys[saved.name].push_back(saved.state);
  }
  const auto about = saved_optimizers().at(static_cast<std::size_t>(number));
  const auto& saved = at(about, "groups").as<value::List>().items;
  const auto own = optimizer->lent.options_of_groups();
  const auto& locals = optimizer->engine.parameters();
  const auto members = optimizer->members();
  for (std::size_t i = 0; i < members.size(); ++i) {
    plan.options.push_back(options_of(*optimizer->optimizer, own[i], saved[i].as<value::Dict>(), "a group"));
    for (const auto& [name, given, parameter, local] : members[i]) {
      if (!local.defined()) continue;
      if (locals.is_master(local)) reader_->want_master(parts, {number, "", name}, local);
      const bool is_owners = optimizer->lent.needs() == fused::Needs::kWhole && locals.shard(local);
      if (is_owners && !locals.updates_whole(local)) continue;
      for (const auto& key : keys[name]) {
        plan.states.push_back(
            {name, key, local, reader_->want_state(parts, locals, {number, key, name}, local, std::nullopt)});
      }
    }
  }
  return plan;
}

void Resumption::apply(Plan plan) {
  const at::NoGradGuard no_grad;
  for (auto& [optimizer, options, states] : plan) {
    std::map<std::string, Fields> fields;
    for (const auto& each : states) {
      auto [key, field] = field_of(*optimizer->optimizer, each.key, each.local, each.staged);
      if (!field.isNone()) fields[each.parameter].emplace(std::move(key), std::move(field));
    }
    distributed_optimizer::NamedState state;
    for (const auto& [name, own] : fields) state.states[name] = state_value(own);
    optimizer->load(state, /*are_parts=*/true, options);
  }
}

void Resumption::read_generator() {
  auto& session = *job_.session;
  std::vector<at::Tensor> none;
  const auto& about = reader_->manifest().about;
  if (!about.contains("layout") || about["layout"] != checkpoint::to_json(layout_of(session), none, false)) return;
  generator_ = reader_->want_content(base::str("generator/", session.world().rank));
  reader_->read(session);
}

void Resumption::go_on() {
  auto& session = *job_.session;
  const auto saved_scale = reader_->about("loss_scale", false);
  const auto scale = job_.loss_scale.lock();
  if (const auto* dict = saved_scale.get_if<value::Dict>();
      dict != nullptr && load_optimizer_ && scale != nullptr && scale->is_dynamic()) {
    const auto whole = [&](const char* key) { return at(*dict, key).as<std::int64_t>(); };
    scale->set_state({at(*dict, "scale").as<double>(), static_cast<int>(whole("overflows_left")), whole("steps"),
                      whole("last_overflow")});
  }
  if (const auto steps = reader_->about("seeded_steps", false); steps.get_if<std::int64_t>() != nullptr) {
    auto& seeds = session.job().seeds();
    if (seeds.steps()) seeds.go_on_after(static_cast<std::uint64_t>(steps.as<std::int64_t>()));
  }
  if (!generator_.defined()) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard guard(generator.mutex());
  generator.set_state(generator_);
}

}  // namespace lamina::frontend
