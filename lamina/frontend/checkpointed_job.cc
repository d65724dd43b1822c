// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/checkpointed_job.h"

#include <c10/core/GradMode.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <algorithm>
#include <unordered_map>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/frontend/fused_optimizer.h"
#include "lamina/frontend/model.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/job_checkpoint/together.h"

namespace lamina::frontend {
namespace {

using job_checkpoint::at;
using value::Value;

constexpr const char* kCount = "step";  // of updates: a number in C++, a tensor in Python's torch

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
c10::IValue number_for(const torch::optim::Optimizer& optimizer, const std::string& key, const at::Scalar& number) {
  if (dynamic_cast<const FusedOptimizer*>(&optimizer) != nullptr) return number.toDouble();
  if (key == kCount && counts_in_numbers(optimizer)) return number.toLong();
  return number;
}

// A field of a state as the optimizer has it, from what others may have there.
c10::IValue field_for(const torch::optim::Optimizer& optimizer, const std::string& key, const at::Tensor& local,
                      const Value& saved) {
  const auto* tensor = saved.get_if<at::Tensor>();
  if (tensor == nullptr) {
    const auto held = to_ivalue(saved);
    return held.isNone() ? held : number_for(optimizer, key, held.toScalar());
  }
  if (tensor->dim() == 0 && is_number_in(optimizer, key)) return number_for(optimizer, key, tensor->item());
  const bool is_like = tensor->dim() > 0 && tensor->sizes() == local.sizes();
  return is_like ? tensor->to(local.scalar_type()) : *tensor;
}

}  // namespace

bool CheckpointedOptimizer::is_ours() const {
  return dynamic_cast<const FusedOptimizer*>(optimizer_->optimizer.get()) != nullptr;
}

std::vector<std::string> CheckpointedOptimizer::class_names() const { return {class_name(*optimizer_->optimizer)}; }

std::vector<value::Dict> CheckpointedOptimizer::options() const {
  std::vector<value::Dict> all;
  for (const auto& fields : optimizer_->lent.options_of_groups()) {
    all.push_back(value_of(fields, "an option of an optimizer,").as<value::Dict>());
  }
  return all;
}

std::vector<std::string> CheckpointedOptimizer::lacking(std::size_t group, const value::Dict& options) const {
  std::vector<std::string> names;
  if (is_ours()) return names;  // which has presets
  const auto groups = optimizer_->lent.options_of_groups();
  for (const auto& [name, own] : groups.at(group)) {
    const bool may_lack = own.isNone() || own.isBool();  // as those of other versions do
    if (!may_lack && at(options, name).get_if<value::None>() != nullptr) names.push_back(name);
  }
  return names;
}

Fields CheckpointedOptimizer::options_from(Fields own, const value::Dict& saved) const {
  for (auto& [name, option] : own) {
    const auto found = to_ivalue(at(saved, name));
    if (found.isNone() && (is_ours() || option.isBool())) continue;
    option = option.isDouble() && found.isInt() ? c10::IValue(static_cast<double>(found.toInt())) : found;
  }
  return own;
}

void CheckpointedOptimizer::load(const std::map<std::string, value::Dict>& states,
                                 const job_checkpoint::OptimizerAbout& about) {
  const at::NoGradGuard no_grad;
  std::vector<Fields> options;
  const auto own = optimizer_->lent.options_of_groups();
  for (std::size_t i = 0; i < own.size(); ++i) options.push_back(options_from(own[i], about.groups.at(i).options));
  distributed_optimizer::NamedState state;
  for (const auto& group : optimizer_->members()) {
    for (const auto& member : group) {
      const auto found = states.find(member.name);
      if (found == states.end()) continue;
      Fields fields;
      for (const auto& [key, saved] : found->second.items) {
        const auto& name = key.as<std::string>();
        auto field = field_for(*optimizer_->optimizer, name, member.local, saved);
        if (!field.isNone()) fields.emplace(name, std::move(field));
      }
      state.states[member.name] = state_value(fields);
    }
  }
  optimizer_->load_parts(state, options);
}

std::unique_ptr<job_checkpoint::JobAccess> Current::lend() { return std::make_unique<CheckpointedJob>(*this); }

CheckpointedJob::CheckpointedJob(Current& job, const std::map<std::string, c10::IValue>* content, Translate translate)
    : job_checkpoint::JobAccess(job.session->ranks(), job.session->job()),
      job_(job),
      content_(content),
      translate_(std::move(translate)) {}

bool CheckpointedJob::is_cut() const { return job_.model->partitioned(); }
bool CheckpointedJob::accumulates() const { return job_.model->accumulates(); }
const model::ParameterTable& CheckpointedJob::table() const { return job_.model->table(); }
sharding::Sharding* CheckpointedJob::sharding() const { return job_.model->sharding(); }
plan::KeptPartition CheckpointedJob::partition() const { return job_.model->partition(); }

std::vector<job_checkpoint::NamesOf> CheckpointedJob::model_state() const {
  std::vector<job_checkpoint::NamesOf> all;
  std::unordered_map<const void*, std::size_t> numbers;
  for (auto& [name, tensor] : job_.model->tree().named()) {
    const auto [found, is_new] = numbers.emplace(tensor.unsafeGetTensorImpl(), all.size());
    if (is_new) all.push_back({{}, tensor});
    all[found->second].first.push_back(std::move(name));
  }
  return all;
}

std::vector<job_checkpoint::OptimizerAccess*> CheckpointedJob::optimizers() {
  std::vector<job_checkpoint::OptimizerAccess*> all;
  for (const auto& optimizer : optimizers_of(job_)) {
    auto& lent = optimizers_[optimizer.get()];
    if (lent == nullptr) lent = std::make_unique<CheckpointedOptimizer>(optimizer);
    all.push_back(lent.get());
  }
  return all;
}

void CheckpointedJob::settle() {
  for (const auto& optimizer : optimizers_of(job_)) optimizer->replace_new();
}

value::Value CheckpointedJob::user_content() { return value_of(*content_, "the user_content"); }

void CheckpointedJob::take_content(const value::Value& content) {
  taken_.clear();
  if (content.get_if<value::None>() != nullptr) return;
  const auto is_named = [](const auto& item) { return item.first.template get_if<std::string>() != nullptr; };
  const auto* dict = content.get_if<value::Dict>();
  const bool has_names = dict != nullptr && std::ranges::all_of(dict->items, is_named);
  taken_ = has_names ? to_fields(content) : Fields{{"", to_ivalue(content)}};
}

void CheckpointedJob::wait_for_cut(std::shared_ptr<job_checkpoint::Resumption> resumption) {
  job_.waiting = std::move(resumption);
}

void CheckpointedJob::load_translated(std::map<std::string, at::Tensor> state) {
  job_checkpoint::together(peers(), [&] { state = translate_(std::move(state)); });
  job_checkpoint::together(peers(), [&] { job_.model->load(state); });
}

void CheckpointedJob::take_pickle(const std::filesystem::path& file, const value::Value& known) {
  take_content(known);
  const bool is_unknown = known.get_if<value::None>() != nullptr;
  if (is_unknown && peers().is_first() && std::filesystem::exists(file)) {
    base::log_warning(base::str(file.string(), " has objects of Python's, which a program in C++ does not get"));
  }
}

}  // namespace lamina::frontend
