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
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <typeindex>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/frontend/current.h"
#include "lamina/frontend/job_optimizer.h"
#include "lamina/frontend/job_state.h"
#include "lamina/frontend/model.h"

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
  if (measures_all && job.pipelined()) {
    throw base::UsageError(
        "LBFGS measures all parameters of a model at once, and a rank has those of its partition: with several "
        "partitions take an optimizer that updates each parameter by itself",
        base::Code{"model-one-rank-optimizer"});
  }
  const auto needs = needs_of(optimizer);
  const auto& config = job.session->config();
  const bool sharded = config.sharded_data_parallel_degree > 1;
  const bool divided = config.shard_optimizer_state && job.session->topology().size(topology::Group::kRdp) > 1;
  if (needs || !(sharded || divided)) return needs.value_or(Needs::kElements);
  const auto name = c10::demangle(typeid(optimizer).name());
  const auto* key = sharded ? "sharded_data_parallel_degree" : "shard_optimizer_state";
  const auto why =
      measures_all
          ? std::string("it measures all parameters of a model at once: take one that updates each by itself")
          : base::str(
                "it is not known whether it looks at more of one than the element that it updates. Say so before: "
                "lamina::register_functional_optimizer<",
                name,
                ">(lamina::Needs::kElements), or kWhole, with which each parameter is updated on one rank that "
                "has all of it");
  const auto text = base::str(name, " with ", key, ": a rank has a part of each parameter, and ", why);
  if (sharded) throw base::UsageError(text, base::Code{"shard-optimizer"});
  throw base::UsageError(text, base::Code{"optimizer-divided"});
}

// The scale of the job, which is this one's.
std::shared_ptr<optim::LossScale> shared_scale(Current& job, const optim::LossScale& scale) {
  auto shared = job.loss_scale.lock();
  if (shared == nullptr) {
    shared = std::make_shared<optim::LossScale>(scale);
    job.loss_scale = shared;
    if (job.model != nullptr) job.model->scale_by(shared);
  } else if (shared->is_dynamic() || scale.is_dynamic() || shared->value() != scale.value()) {
    throw base::UsageError(
        "a job has one loss scale, which model.backward() takes: give every DistributedOptimizer the same static one, "
        "or have one optimizer, with the parameters as groups",
        base::Code{"optimizer-loss-scale"});
  }
  return shared;
}

}  // namespace

struct OptimizerPart::Rest : JobOptimizer {
  FusedOptimizer* const fused;  // nullptr for one of torch's, or of a program's
  const Needs needs;
  session::OptimizerSteps::Begun begun;
  std::int64_t measured_after = -1;     // so many passes of the model
  std::optional<double> clip;           // the norm that the next step clips to, where clip_master_grads() has said so
  std::int64_t plain_forgotten = 0;     // gradients of other backwards than the model's that zero_grad() forgot
  std::optional<OptimizerState> waits;  // to be loaded when the model is cut
  std::shared_ptr<PartitionCallback> on_partition;

  Rest(std::shared_ptr<torch::optim::Optimizer> its, Needs its_needs, std::shared_ptr<optim::LossScale> its_scale)
      : JobOptimizer(std::move(its), its_needs, std::move(its_scale), *current().session),
        fused(dynamic_cast<FusedOptimizer*>(optimizer.get())),
        needs(its_needs) {}

  // Says whether the job that it was made in goes on.
  bool in_job() const {
    return has_current() && std::ranges::any_of(current().callbacks, [this](const auto& callback) {
             return callback.lock() == on_partition;
           });
  }
  void require_job(const char* what) const {
    if (in_job()) return;
    throw base::UsageError(base::str("optimizer.", what, " of a DistributedOptimizer whose job was shut down"),
                           base::Code{"step-after-shutdown"});
  }

  // True where groups have what they are to have in steps.
  bool is_cut() const {
    const auto& model = current().model;
    return model != nullptr && model->partitioned();
  }

  void replace(const HeldHere& held) {
    auto& model = *current().model;
    steps.set_model([&model] { return &model.table(); }, model.shared_sharding());
    groups.replace(held);
    if (!steps.beside().empty()) model.watch();
    if (waits) groups.load(*std::exchange(waits, std::nullopt), /*options=*/false);
  }
  void replace_new() override {
    if (!is_cut() || groups.are_replaced()) return;
    auto& model = *current().model;
    replace([&model](const at::Tensor& tensor) { return model.held_here(tensor); });
  }

  static std::int64_t passes() { return current().model == nullptr ? 0 : current().model->passes(); }
  bool is_measured() const { return current().model != nullptr && measured_after == passes(); }

  // Throws base::UsageError where a backward that was not the model's own has left gradients among scaled ones.
  void require_scaled() const {
    const auto& model = current().model;
    if (model == nullptr || !scale->is_on()) return;
    const auto& backwards = model->backwards();
    if (backwards.plain() <= std::max(plain_forgotten, backwards.plain_forgotten())) return;
    throw base::UsageError(
        base::str("the optimizer has a loss scale (", scale->value(),
                  "), and divides gradients by it, but some came from a loss.backward() since its last zero_grad(): "
                  "call model.backward(loss), which multiplies the loss by it, in the place of each loss.backward()"),
        base::Code{"optimizer-not-scaled"});
  }

  static bool with_copies() { return current().model == nullptr || !current().model->joining(); }
  // See [Note: options]; nothing where nobody compares them.
  std::string options() const {
    if (!is_cut() || current().session->world().size == 1) return "";
    const auto all = optimizers_of(current());
    const auto number = std::ranges::find(all, optimizer, &JobOptimizer::optimizer) - all.begin();
    std::ostringstream own;
    own.precision(12);
    own << "the number of the optimizer = " << number << "\nthe class = " << class_name(*optimizer)
        << "\nthe loss scale = " << scale->value() << "\nthe norm given to clip_master_grads() = " << clip.value_or(0)
        << "\nthe number of updates that an error broke off = " << broken_off
        << "\nthe number of states that were loaded into it = " << loads
        << "\nthe number of groups = " << optimizer->param_groups().size();
    return own.str() + groups.options(/*counts=*/!current().pipelined());
  }

  const session::OptimizerSteps::Begun& measure() {
    require_scaled();
    begun = steps.begin(groups.places(), clip.value_or(limit()), with_copies(), options());
    measured_after = passes();
    const auto& model = current().model;
    const bool clips = !clip && model != nullptr && model->sharding() != nullptr && begun.clipped_norm < begun.norm;
    if (clips && std::exchange(current().clips_by_default, false)) tell_of_clipping();
    return begun;
  }

  void tell_of_clipping() const {
    if (current().session->world().rank != base::Rank(0)) return;
    base::log_warning(base::str("gradients of norm ", begun.norm, " were clipped to ", begun.clipped_norm,
                                ", the default of sdp_gradient_clipping, as larger ones are in every step; set that "
                                "key to the norm that you mean (1e9 clips nothing)"));
  }

  // The norm that gradients are clipped to.
  double limit() const {
    const auto& model = current().model;
    if (model != nullptr && model->sharding() != nullptr) return current().session->config().sdp_gradient_clipping;
    const bool needs_norm = fused != nullptr && fused->functional().declaration().gradient_norm;
    return needs_norm ? std::numeric_limits<double>::max() : session::kNoClipping;
  }

  void update() {
    const bool as_is = fused != nullptr && needs != Needs::kWhole;
    ++broken_off;
    steps.give_gradients(groups.places(), begun, as_is);
    groups.update([&] {
      if (fused == nullptr) {
        optimizer->step();
      } else {
        fused->step_in({.factor = as_is ? begun.factor : 1, .norm = begun.clipped_norm, .steps = &steps});
      }
    });
    steps.end(as_is);
    --broken_off;
  }

  // Tells parts of states apart: this rank, and its layout.
  std::vector<std::int64_t> place() const {
    const auto& session = *current().session;
    std::vector<std::int64_t> all;
    for (const auto group : {topology::Group::kPp, steps.divided_over().value_or(topology::Group::kPp)}) {
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
  rest_->on_partition =
      std::make_shared<PartitionCallback>([rest = rest_.get()](const auto& held) { rest->replace(held); });
  job.optimizers.push_back(rest_);
  frontend::on_partition(rest_->on_partition);
}

void OptimizerPart::step(bool has_closure) {
  auto& rest = *rest_;
  if (!rest.in_job()) {
    if (rest.steps.stand_ins().size() > 0 || rest.scale->is_on()) rest.require_job("step()");
    rest.optimizer->step();
    return;
  }
  const auto& model = current().model;
  if (has_closure && model != nullptr && model->sharding() != nullptr) {
    throw base::UsageError(
        "optimizer.step(closure) with sharded parameters: their gradients are clipped before the step; call the "
        "closure yourself, and then optimizer.step()",
        base::Code{"shard-not-with"});
  }
  if (model != nullptr) model->before_update();
  rest.replace_new();
  if (rest.is_measured()) {
    rest.steps.require_alike(rest.options(), rest.with_copies());
  } else {
    rest.measure();
  }
  rest.measured_after = -1;
  rest.clip.reset();
  if (rest.begun.overflow) {
    rest.steps.leave_out();
  } else {
    rest.update();
  }
}

void OptimizerPart::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  if (rest_->fused != nullptr) {
    rest_->fused->add_param_group(group);
  } else {
    rest_->optimizer->add_param_group(group);
  }
  if (rest_->in_job()) rest_->replace_new();
}

void OptimizerPart::zero_rest(bool set_to_none) {
  if (!rest_->in_job()) return;
  rest_->measured_after = -1;
  rest_->clip.reset();
  const auto& model = current().model;
  if (model != nullptr) rest_->plain_forgotten = model->backwards().plain();
  for (const auto& place : rest_->groups.places()) {
    const auto number = rest_->steps.stand_ins().find(place);
    const auto& holder = number ? rest_->steps.stand_ins().of(*number) : place;
    auto* sharding = model == nullptr ? nullptr : model->sharding();
    if (const auto shard = sharding == nullptr ? std::nullopt : sharding->find_shard(holder)) {
      sharding->zero_grad(*shard, set_to_none);
    } else if (number && holder.grad().defined()) {
      set_to_none ? holder.mutable_grad().reset() : void(holder.mutable_grad().zero_());
    }
  }
}

double OptimizerPart::clip(double max_norm) {
  rest_->require_job("clip_master_grads()");
  if (current().model != nullptr) current().model->complete_gradients("clip_master_grads()");
  rest_->replace_new();
  rest_->clip = max_norm;
  const auto& begun = rest_->measure();
  return begun.overflow ? -1 : begun.norm;
}

bool OptimizerPart::overflow() const { return rest_->begun.overflow; }
double OptimizerPart::grad_norm() const { return rest_->begun.norm; }
double OptimizerPart::loss_scale() const { return rest_->scale->value(); }

void OptimizerPart::save(torch::serialize::OutputArchive& archive, bool whole) const {
  auto& rest = *rest_;
  rest.require_job(whole ? "save()" : "save_local()");
  if (rest.waits) {
    throw base::UsageError(
        "a state that was loaded into the optimizer waits for the model to be partitioned: ask for its state after the "
        "first step",
        base::Code{"state-before-cut"});
  }
  if (!whole && !rest.is_cut()) {
    throw base::UsageError("optimizer.save_local(): nothing is local before the model is partitioned",
                           base::Code{"state-before-cut"});
  }
  rest.replace_new();
  auto& session = *current().session;
  auto state = rest.groups.state(whole, session.members(topology::Group::kPp), session.mailbox(), session.patience());
  if (rest.scale->is_on()) state.scale = rest.scale->state();
  if (!whole) state.saved_by = rest.place();
  write(state, archive);
}

void OptimizerPart::load(torch::serialize::InputArchive& archive) {
  auto& rest = *rest_;
  rest.require_job("load()");
  rest.replace_new();
  auto state = read(archive);
  auto problem = rest.groups.misfit(state);
  if (!state.saved_by.empty() && state.saved_by != rest.place()) {
    problem = "it is the part of another rank, or of another layout: load what save() has saved";
  }
  if (!state.saved_by.empty() && !rest.is_cut()) problem = "the part of a rank is loaded after the first step";
  if (!problem.empty()) throw base::UsageError("optimizer.load(): " + problem, base::Code{"state-other-optimizer"});
  if (rest.scale->is_dynamic() && state.scale) rest.scale->set_state(*state.scale);
  ++rest.loads;
  rest.broken_off = 0;
  if (rest.is_cut() || !(current().pipelined() || rest.steps.replaces())) {
    rest.groups.load(state, /*options=*/true);
    return;
  }
  auto options = state;
  options.states.clear();
  rest.groups.load(options, /*options=*/true);
  rest.waits = std::move(state);
}

void on_partition(const std::shared_ptr<PartitionCallback>& callback) {
  auto& job = outside_step("DistributedOptimizer()");
  job.callbacks.push_back(callback);
  if (job.model == nullptr || !job.model->partitioned()) return;
  (*callback)([&job](const at::Tensor& tensor) { return job.model->held_here(tensor); });
}

}  // namespace lamina::frontend
