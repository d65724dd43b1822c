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
#include <map>
#include <mutex>
#include <optional>
#include <typeindex>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"
#include "lamina/frontend/current.h"
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

// Returns what it needs, where that matters; throws where it is unknown, or all parameters at once.
Needs checked_needs(const torch::optim::Optimizer& optimizer) {
  const auto& job = outside_step("DistributedOptimizer()");
  const bool measures_all = dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr;
  const bool is_sliced = job.session->topology().size(topology::Group::kTp) > 1;
  if (measures_all && job.pipelined()) {
    throw faces::refusal("lbfgs-in-parts");
  }
  const auto needs = needs_of(optimizer);
  const auto& config = job.session->config();
  const bool sharded = config.sharded_data_parallel_degree > 1;
  const bool is_divided = model::updates_divided_over(job.session->topology(), config).has_value();
  if (needs || (!is_divided && !is_sliced)) return needs.value_or(Needs::kElements);
  const auto name = c10::demangle(typeid(optimizer).name());
  const auto said = base::str("lamina::register_functional_optimizer<", name, ">(lamina::Needs::kElements), or kWhole");
  const auto why = measures_all ? faces::said("measures-all") : faces::said("needs-unknown", said);
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

struct OptimizerPart::Rest : JobOptimizer {
  std::optional<OptimizerState> waits;  // to be loaded when the model is cut
  std::shared_ptr<PartitionCallback> on_partition;

  Rest(std::shared_ptr<torch::optim::Optimizer> its, Needs needs, const std::shared_ptr<optim::LossScale>& scale)
      : JobOptimizer(std::move(its), needs, scale, current()) {}

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
  bool is_cut() const {
    const auto& model = current().model;
    return model != nullptr && model->partitioned();
  }

  void cut() {
    auto& model = *current().model;
    engine.parameters().set_model([&model] { return &model.table(); }, model.shared_sharding());
    if (engine.groups().trim(lent)) model.watch();
    if (waits) load(named(*waits), /*are_parts=*/false, lent.options_of_groups());
    waits.reset();
  }
  // A checkpoint that waits for the cut would undo what is loaded, and is not in what is saved.
  static void require_none_waits(const std::string& call) {
    const auto& waiting = current().waiting;
    if (waiting != nullptr && waiting->has_optimizers()) job_checkpoint::require_none_waits(waiting.get(), call);
  }
  void replace_new() override {
    if (!is_cut()) return;
    if (!engine.groups().are_cut(lent)) cut();
    engine.parameters().share_written();
  }

  static distributed_optimizer::ModelInUse model() {
    return current().model == nullptr ? distributed_optimizer::ModelInUse() : current().model->in_use();
  }

  // A state by numbers by the names of parameters, and back: of `whole` groups.
  distributed_optimizer::NamedState named(const OptimizerState& state) const {
    distributed_optimizer::NamedState named;
    std::int64_t number = 0;
    for (const auto& group : members()) {
      for (const auto& member : group) {
        if (const auto found = state.states.find(number); found != state.states.end()) {
          named.states[member.name] = state_value(found->second);
        }
        if (const auto master = state.masters.find(number); master != state.masters.end()) {
          named.masters[member.name] = master->second;
        }
        ++number;
      }
    }
    return named;
  }
  OptimizerState numbered(const distributed_optimizer::NamedState& named, bool whole) const {
    OptimizerState state;
    std::int64_t number = 0;
    auto options = lent.options_of_groups();
    const auto all = members();
    for (std::size_t i = 0; i < all.size(); ++i) {
      auto& group = state.groups.emplace_back();
      group.options = std::move(options[i]);
      for (const auto& member : all[i]) {
        if (whole || member.local.defined()) group.parameters.push_back(number);
        if (const auto found = named.states.find(member.name); found != named.states.end()) {
          state.states[number] = to_fields(found->second);
        }
        if (const auto master = named.masters.find(member.name); master != named.masters.end()) {
          state.masters[number] = master->second;
        }
        ++number;
      }
    }
    return state;
  }
  // Says what is wrong with a state, "" if nothing.
  std::string misfit(const OptimizerState& state) const {
    const auto all = members();
    if (state.groups.size() != all.size()) {
      return faces::said("other-groups", state.groups.size(), all.size());
    }
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bool whole = state.saved_by.empty();
      const auto here = std::ranges::count_if(all[i], [&](const auto& each) { return whole || each.local.defined(); });
      if (std::ssize(state.groups[i].parameters) == here) continue;
      return faces::said("other-members", i, state.groups[i].parameters.size(), here);
    }
    return engine.states().misfit(lent, named(state).masters, /*are_parts=*/!state.saved_by.empty());
  }

  // Tells parts of states apart: this rank, and its layout.
  std::vector<std::int64_t> place() const {
    const auto& session = *current().session;
    std::vector<std::int64_t> all;
    for (const auto group : {topology::kOneCopy, engine.parameters().divided_over().value_or(topology::kOneCopy)}) {
      const auto members = session.members(group);
      all.push_back(std::ranges::find(members, session.world().rank) - members.begin());
      all.push_back(std::ssize(members));
    }
    return all;
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
  if (const auto& recorder = job.session->run_recorder()) {
    job_checkpoint::record_updates(rest_->engine, job.session->ranks(), recorder);
  }
  rest_->on_partition = std::make_shared<PartitionCallback>([rest = rest_.get()] { rest->cut(); });
  job.optimizers.push_back(rest_);
  frontend::on_partition(rest_->on_partition);
}

at::Tensor OptimizerPart::step(torch::optim::Optimizer::LossClosure closure) {
  auto& rest = *rest_;
  if (!rest.in_job()) {
    if (rest.engine.groups().hold_others() || rest.engine.scale().is_on()) rest.require_job("step()");
    return rest.optimizer->step(std::move(closure));
  }
  rest.replace_new();
  rest.engine.step(rest.lent, rest.model(), rest.lent.closed(std::move(closure)));
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
  rest_->engine.zero_grad(rest_->lent, rest_->model(), set_to_none);
}

double OptimizerPart::clip(double max_norm) {
  rest_->require_job("clip_master_grads()");
  rest_->replace_new();
  return rest_->engine.clip(rest_->lent, rest_->model(), max_norm);
}

bool OptimizerPart::overflow() const { return rest_->engine.overflow(); }
double OptimizerPart::grad_norm() const { return rest_->engine.norm(); }
double OptimizerPart::loss_scale() const { return rest_->engine.scale().value(); }

void OptimizerPart::save(torch::serialize::OutputArchive& archive, bool whole) const {
  auto& rest = *rest_;
  rest.require_job(whole ? "save()" : "save_local()");
  if (rest.waits) throw faces::refusal("state-waits", "a state of the optimizer", "ask for it");
  Rest::require_none_waits(whole ? "optimizer.save()" : "optimizer.save_local()");
  if (!whole && !rest.is_cut()) throw faces::refusal("nothing-local", "optimizer.save_local()");
  rest.replace_new();
  const auto extent = whole ? distributed_optimizer::Extent::kWhole : distributed_optimizer::Extent::kPart;
  auto state = rest.numbered(rest.engine.states().state(rest.lent, extent), whole);
  if (const auto& scale = rest.engine.scale(); scale.is_on()) state.scale = scale.state();
  if (!whole) state.saved_by = rest.place();
  write(state, archive);
}

void OptimizerPart::load(torch::serialize::InputArchive& archive) {
  auto& rest = *rest_;
  rest.require_job("load()");
  Rest::require_none_waits("optimizer.load()");
  rest.replace_new();
  auto state = read(archive);
  auto problem = rest.misfit(state);
  if (!state.saved_by.empty() && state.saved_by != rest.place()) {
    problem = "it is the part of another rank, or of another layout: load what save() has saved";
  }
  if (!state.saved_by.empty() && !rest.is_cut()) problem = "the part of a rank is loaded after the first step";
  if (!problem.empty()) throw faces::refusal("other-state", problem);
  if (auto& scale = rest.engine.scale(); scale.is_dynamic() && state.scale) scale.set_state(*state.scale);
  std::vector<Fields> options;
  for (const auto& group : state.groups) options.push_back(group.options);
  const bool waits = !rest.is_cut() && (current().pipelined() || rest.engine.parameters().replaces());
  rest.load(waits ? distributed_optimizer::NamedState() : rest.named(state), !state.saved_by.empty(), options);
  if (waits) rest.waits = std::move(state);
}

void on_partition(const std::shared_ptr<PartitionCallback>& callback) {
  auto& job = outside_step("DistributedOptimizer()");
  job.callbacks.push_back(callback);
  if (job.model == nullptr || !job.model->partitioned()) return;
  (*callback)();
}

}  // namespace lamina::frontend
