// SPDX-License-Identifier: Apache-2.0
#include "lamina/frontend/optimizer.h"

#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <typeindex>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/device_errors.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/frontend/model.h"
#include "lamina/job_checkpoint/record_job.h"
#include "lamina/job_checkpoint/resumption.h"
#include "lamina/model/make_table.h"

namespace lamina::frontend {

namespace {

// Classes, and what they need of a parameter.
struct KnownNeeds {
  std::mutex mutex;
  std::map<std::type_index, Needs> by_type;

  static KnownNeeds& ours() {
    static auto& known = *new KnownNeeds{.by_type = {{typeid(torch::optim::SGD), Needs::kElements},
                                                     {typeid(torch::optim::Adam), Needs::kElements},
                                                     {typeid(torch::optim::AdamW), Needs::kElements},
                                                     {typeid(torch::optim::Adagrad), Needs::kElements},
                                                     {typeid(torch::optim::RMSprop), Needs::kElements}}};
    return known;
  }
};

std::optional<Needs> needs_of(const torch::optim::Optimizer& optimizer) {
  if (const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer))
    return fused->functional().declaration().needs;
  auto& known = KnownNeeds::ours();
  const std::lock_guard guard(known.mutex);
  const auto found = known.by_type.find(typeid(optimizer));
  return found == known.by_type.end() ? std::nullopt : std::optional(found->second);
}

bool measures_all(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr;
}

// Says why an optimizer cannot update parts of parameters, "" where it can.
std::string why_not_parts(const torch::optim::Optimizer& optimizer) {
  if (measures_all(optimizer)) return faces::said("measures-all");
  if (needs_of(optimizer)) return "";
  const auto said = base::str("lamina::register_functional_optimizer<", c10::demangle(typeid(optimizer).name()),
                              ">(lamina::Needs::kElements), or kWhole");
  return faces::said("needs-unknown", said);
}

// Returns what it needs, where that matters; throws where it is unknown, or all parameters at once.
Needs checked_needs(const torch::optim::Optimizer& optimizer) {
  const auto& job = outside_step("DistributedOptimizer()");
  const bool is_sliced = job.session->topology().size(topology::Group::kTp) > 1;
  if (measures_all(optimizer) && job.pipelined()) {
    throw faces::refusal("lbfgs-in-parts");
  }
  const auto needs = needs_of(optimizer);
  const auto& config = job.session->config();
  const bool sharded = config.sharded_data_parallel_degree > 1;
  const bool is_divided = model::updates_divided_over(job.session->topology(), config).has_value();
  if (needs || (!is_divided && !is_sliced)) return needs.value_or(Needs::kElements);
  const auto name = c10::demangle(typeid(optimizer).name());
  const auto why = why_not_parts(optimizer);
  if (is_sliced) throw faces::refusal("sliced-optimizer", name, why);
  throw sharded ? faces::refusal("sharded-optimizer", name, why) : faces::refusal("divided-optimizer", name, why);
}

// The scale of the job, which is this one's.
std::shared_ptr<optim::LossScale> shared_scale(Current& job, const optim::LossScale& scale) {
  auto shared = job.loss_scale.lock();
  if (shared == nullptr) {
    shared = std::make_shared<optim::LossScale>(scale);
    job.loss_scale = shared;
    if (job.model != nullptr) job.model->scale_by(shared);
  } else if (shared->is_dynamic() || scale.is_dynamic() || shared->value() != scale.value()) {
    throw faces::refusal("two-loss-scales");
  }
  return shared;
}

}  // namespace

void JobOptimizer::join(const std::shared_ptr<JobOptimizer>& optimizer, Current& job) {
  const auto& session = *job.session;
  optimizer->engine.emplace(job.session->ranks(), session.config(), optimizer->scale, std::ssize(job.optimizers),
                            job.clips_by_default);
  if (session.clips_as_shards()) optimizer->engine->clip_as_shards();
  job.optimizers.push_back(optimizer);
}

void JobOptimizer::let_go(bool with_states) {
  std::vector<std::vector<at::Tensor>> groups;
  for (const auto& members : members()) {
    auto& group = groups.emplace_back();
    for (const auto& member : members) group.push_back(member.parameter);
  }
  lent.exchange(groups, {});
  if (!with_states) optimizer->state().clear();
}

struct OptimizerPart::Rest : JobOptimizer {
  std::optional<distributed_optimizer::StateDict> waits;  // to be loaded when the model is cut
  std::shared_ptr<PartitionCallback> on_partition;

  using JobOptimizer::JobOptimizer;

  // Says whether the job that it was made in goes on.
  bool in_job() const {
    return has_current() && std::ranges::any_of(current().callbacks, [this](const auto& callback) {
             return callback.lock() == on_partition;
           });
  }
  void require_job(const char* what) const {
    if (in_job()) return;
    throw faces::refusal("job-ended", base::str("optimizer.", what), "DistributedOptimizer");
  }

  // True where groups have what they are to have in steps.
  static bool is_cut() {
    const auto& model = current().model;
    return model != nullptr && model->partitioned();
  }

  void cut() {
    auto& model = *current().model;
    engine->parameters().set_model([&model] { return &model.table(); }, model.shared_sharding());
    if (engine->groups().trim(lent)) model.watch();
    if (const auto rows = std::exchange(waits, std::nullopt)) load_rows(*rows, lent.options_of_groups());
  }
  // A checkpoint that waits for the cut would undo what is loaded, and is not in what is saved.
  static void require_none_waits(const std::string& call) {
    const auto& waiting = current().waiting;
    if (waiting != nullptr && waiting->has_optimizers()) job_checkpoint::require_none_waits(waiting.get(), call);
  }
  Rest& ready_to_save(const char* what) {
    require_job(what);
    if (waits) throw faces::refusal("state-waits", "a state of the optimizer", "ask for it");
    require_none_waits(base::str("optimizer.", what));
    replace_new();
    return *this;
  }
  void write_rows(const distributed_optimizer::StateDict& rows, torch::serialize::OutputArchive& archive) const {
    auto state = from_rows(rows, lent.options_of_groups());
    state.rng_steps = current().session->job().seeds().steps();
    write(state, archive);
  }
  session::ChangingOptimizer told() const override {
    session::ChangingOptimizer told{.name = class_name(*optimizer), .why_not_parts = why_not_parts(*optimizer)};
    told.measures_all = measures_all(*optimizer);
    told.waits = waits.has_value();
    const auto models = lent.named_parameters();
    for (const auto& group : members()) {
      for (const auto& member : group) {
        const auto is_it = [&](const auto& given) { return given.tensor.is_same(member.parameter); };
        if (told.beside.empty() && std::ranges::none_of(models, is_it)) told.beside = member.name;
      }
    }
    return told;
  }
  void replace_new() override {
    if (!is_cut()) return;
    if (!engine->groups().are_cut(lent)) cut();
    engine->parameters().share_written();
  }

  static distributed_optimizer::ModelInUse model() {
    return current().model == nullptr ? distributed_optimizer::ModelInUse() : current().model->in_use();
  }

  // Gives a part with old numbers the names of parameters.
  void name_parts(OptimizerState& state) const {
    topology::SavedPlace place;
    const auto& session = *current().session;
    for (const auto group : {topology::kOneCopy, engine->parameters().divided_over().value_or(topology::kOneCopy)}) {
      place.push_back(session.topology().index(group, session.world().rank));
      place.push_back(session.topology().size(group));
    }
    if (place != state.saved_by || !is_cut()) {
      throw faces::refusal("other-state",
                           "it is the part of another rank, or of another layout, or the model is not cut yet: load "
                           "what save() has saved");
    }
    auto& names = state.names.emplace();
    for (const auto& group : members()) {
      for (const auto& member : group) names.push_back(member.name);
    }
    for (const auto& group : state.groups) {
      for (const auto number : group.parameters) {
        if (number >= std::ssize(names)) throw faces::refusal("other-state", "it has more parameters");
      }
    }
    state.parts = engine->state_dicts().parts();
    state.saved_by.clear();
  }
};

void set_needs(std::type_index optimizer, Needs needs) {
  if (needs == Needs::kNorms) {
    throw base::UsageError(
        "register_functional_optimizer(): optimizers that measure parameters are those of FusedOptimizer; of another "
        "class it is known as kElements or kWhole");
  }
  auto& known = KnownNeeds::ours();
  const std::lock_guard guard(known.mutex);
  known.by_type[optimizer] = needs;
}

OptimizerPart::OptimizerPart(std::shared_ptr<torch::optim::Optimizer> optimizer, const optim::LossScale& given) {
  const auto needs = checked_needs(*optimizer);
  auto& job = outside_step("DistributedOptimizer()");
  rest_ = std::make_shared<Rest>(std::move(optimizer), needs, shared_scale(job, given));
  JobOptimizer::join(rest_, job);
  if (const auto& recorder = job.session->run_recorder()) {
    job_checkpoint::record_updates(*rest_->engine, job.session->ranks(), recorder);
  }
  rest_->on_partition = std::make_shared<PartitionCallback>([rest = rest_.get()] { rest->cut(); });
  frontend::on_partition(rest_->on_partition);
}

at::Tensor OptimizerPart::step(torch::optim::Optimizer::LossClosure closure) {
  auto& rest = *rest_;
  if (!rest.in_job()) {
    if (rest.engine->groups().hold_others() || rest.engine->scale().is_on()) rest.require_job("step()");
    return rest.optimizer->step(std::move(closure));
  }
  rest.replace_new();
  explained([&] { rest.engine->step(rest.lent, rest.model(), rest.lent.closed(std::move(closure))); });
  rest.after_step();
  return rest.lent.take_loss();
}

void OptimizerPart::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  if (!rest_->in_job()) return rest_->lent.add_param_group(group);
  for (const auto& members : rest_->members()) {
    for (const auto& member : members) {
      const auto is_it = [&](const at::Tensor& added) {
        return member.local.defined() && added.is_same(member.parameter);
      };
      if (std::ranges::any_of(group.params(), is_it)) throw faces::refusal("in-two-groups", member.name);
    }
  }
  rest_->lent.add_param_group(group);
  rest_->replace_new();
}

void OptimizerPart::zero_grad(bool set_to_none) {
  if (!rest_->in_job()) return rest_->optimizer->zero_grad(set_to_none);
  rest_->engine->zero_grad(rest_->lent, rest_->model(), set_to_none);
}

double OptimizerPart::clip(double max_norm) {
  rest_->require_job("clip_master_grads()");
  rest_->replace_new();
  return rest_->engine->clip(rest_->lent, rest_->model(), max_norm);
}

bool OptimizerPart::overflow() const { return rest_->engine->overflow(); }
double OptimizerPart::grad_norm() const { return rest_->engine->norm(); }
double OptimizerPart::loss_scale() const { return rest_->engine->scale().value(); }

void OptimizerPart::save(torch::serialize::OutputArchive& archive, bool to_first) const {
  auto& rest = rest_->ready_to_save("save()");
  if (const auto rows = rest.engine->state_dicts().whole(rest.lent, to_first)) rest.write_rows(*rows, archive);
}

void OptimizerPart::save_local(torch::serialize::OutputArchive& archive, bool joins_shards) const {
  auto& rest = rest_->ready_to_save("save_local()");
  if (!Rest::is_cut()) throw faces::refusal("nothing-local", "optimizer.save_local()");
  rest.write_rows(rest.engine->state_dicts().own(rest.lent, joins_shards), archive);
}

void OptimizerPart::load(torch::serialize::InputArchive& archive) {
  auto& rest = *rest_;
  rest.require_job("load()");
  Rest::require_none_waits("optimizer.load()");
  rest.replace_new();
  auto state = read(archive);
  if (state.has_old_numbers()) rest.name_parts(state);
  auto& seeds = current().session->job().seeds();
  if (state.rng_steps && seeds.steps()) seeds.go_on_after(*state.rng_steps);
  const auto rows = rows_of(state);
  std::vector<Fields> options;
  for (const auto& group : state.groups) options.push_back(group.options);
  if (!rest.engine->state_dicts().waits(rows)) {
    rest.waits.reset();
    return rest.load_rows(rows, options);
  }
  rest.engine->state_dicts().require_fits(rest.lent, rows);
  rest.lent.load(std::vector<value::Value>(rest.lent.members().size()), options);
  rest.waits = rows;
}

void on_partition(const std::shared_ptr<PartitionCallback>& callback) {
  auto& job = outside_step("DistributedOptimizer()");
  job.callbacks.push_back(callback);
  if (job.model == nullptr || !job.model->partitioned()) return;
  (*callback)();
}

}  // namespace lamina::frontend
