// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <sstream>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/distributed_optimizer/options.h"
#include "lamina/faces/sayings.h"

namespace lamina::distributed_optimizer {
namespace {

constexpr double kNoClipping = std::numeric_limits<double>::infinity();
constexpr double kEpsilon = 1e-6;  // torch's, of a norm that gradients are divided by

std::int64_t passes(const ModelInUse& model) {
  return model.backwards == nullptr ? 0 : model.backwards->count() + model.steps;
}

// False where copies may have left a join.
bool has_copies(const ModelInUse& model) { return model.reducer == nullptr || !model.reducer->joining(); }

}  // namespace

Optimizer::Optimizer(collective::Ranks ranks, const config::Config& config, std::shared_ptr<optim::LossScale> scale,
                     std::int64_t number, bool clips_by_default)
    : ranks_(ranks),
      config_(config),
      scale_(std::move(scale)),
      number_(number),
      parameters_(ranks, config),
      beside_(ranks),
      groups_(parameters_, beside_),
      states_(ranks, parameters_, groups_),
      state_dicts_(std::move(ranks), parameters_, groups_, states_, *scale_),
      tells_of_clipping_(clips_by_default) {}

void Optimizer::step(UserOptimizer& user, const ModelInUse& model, const Closure& closure) {
  require_usable(model, closure);
  parameters_.share_written();
  const auto compute = [&] {
    closure();
    if (model.reducer != nullptr) model.reducer->complete("optimizer.step(closure)");
  };
  bool computed = !closure;
  if (parameters_.are_cut()) {
    if (model.reducer != nullptr) model.reducer->before_update();
  } else if (closure && model.backwards != nullptr) {  // it may cut the model
    compute();
    computed = true;
  }
  if (is_plain(user)) {
    Closure again;  // the first of its calls may have been made
    if (closure) again = [&] { std::exchange(computed, false) ? void() : compute(); };
    return step_plainly(user, model, std::move(again));
  }
  if (!computed) compute();
  if (measured_after_ == passes(model)) {
    require_alike(options(user), trained_with(model), ranks_);
  } else {
    measure(user, model);
  }
  measured_after_ = -1;
  clip_.reset();
  begun_.overflow ? leave_out() : update(user);
}

void Optimizer::load(UserOptimizer& user, const NamedState& state, bool are_parts, const Give& give) {
  give(states_.parts_of(user, state, are_parts));
  OptimizerGroups::move_states(user);
  states_.take_masters(user, state.masters, are_parts);
  broken_off_ = 0;  // what updates that an error ended lack is there
}

void Optimizer::load(UserOptimizer& user, const StateDict& dict, const Give& give) {
  load(user, state_dicts_.found_in(user, dict), dict.parts.has_value(), give);
  go_on_with(dict);
}

void Optimizer::load_plain(const StateDict& dict, const std::function<void()>& load) {
  state_dicts_.require_scale(dict);
  load();
  broken_off_ = 0;
  go_on_with(dict);
}

// A dynamic loss scale goes on where it was; a static one is the program's.
void Optimizer::go_on_with(const StateDict& dict) {
  if (scale_->is_dynamic() && dict.scale) scale_->set_state(*dict.scale);
}

// Once, by the job's first rank: so a dynamic scale finds its height.
void Optimizer::leave_out() {
  const double before = scale_->value();
  scale_->update(true);
  if (!std::exchange(tells_of_overflow_, false) || ranks_.own != base::Rank(0)) return;
  base::log_warning(base::str("a step is left out, for its gradients overflowed in half precision. The loss scale was ",
                              before, ", and is ", scale_->value(), " from here on; this is said once"));
}

double Optimizer::clip(UserOptimizer& user, const ModelInUse& model, double max_norm) {
  if (!(max_norm > 0) || !std::isfinite(max_norm)) throw faces::refusal("not-positive", "max_norm", max_norm);
  if (parameters_.are_cut() && model.reducer != nullptr) model.reducer->complete("clip_master_grads()");
  parameters_.share_written();
  clip_ = max_norm;
  measure(user, model);
  measured_after_ = passes(model);
  return begun_.overflow ? -1 : begun_.norm;
}

void Optimizer::zero_grad(UserOptimizer& user, const ModelInUse& model, bool set_to_none) {
  measured_after_ = -1;
  clip_.reset();
  backwards_ = model.backwards == nullptr ? 0 : model.backwards->count();
  plain_ = model.backwards == nullptr ? 0 : model.backwards->plain();
  user.zero_grad(set_to_none);
  auto* sharding = parameters_.sharding();
  for (const auto& member : user.members()) {
    const auto& source = parameters_.source(member);
    if (const auto shard = sharding == nullptr ? std::nullopt : sharding->find_shard(source)) {
      sharding->zero_grad(*shard, set_to_none);
    } else if (!source.is_same(member) && source.grad().defined()) {
      set_to_none ? source.mutable_grad().reset() : void(source.mutable_grad().zero_());
    }
  }
}

void Optimizer::follow() {
  parameters_.follow();
  measured_after_ = -1;
}

// Inside.

// A step with nothing around the update but what all steps have.
bool Optimizer::is_plain(const UserOptimizer& user) const {
  const bool looks_beyond_slices = user.needs() != fused::Needs::kElements && parameters_.have_slices();
  return !scale_->is_on() && !parameters_.replaces() && !looks_beyond_slices && !clip_ && limit(user) == kNoClipping;
}

void Optimizer::step_plainly(UserOptimizer& user, const ModelInUse& model, Closure closure) {
  if (parameters_.are_cut()) require_alike(options(user), trained_with(model), ranks_);
  begun_ = {};
  ++broken_off_;
  if (updated_) updated_(user, groups_.members(user), parameters_.table(), 1);
  user.update({.closure = std::move(closure)});
  beside_.bring();
  --broken_off_;
}

void Optimizer::require_usable(const ModelInUse& model, const Closure& closure) const {
  if (closure && model.backwards != nullptr && config_.sharded_data_parallel_degree > 1) {
    throw base::UsageError(
        "optimizer.step(closure) with sharded parameters: their gradients are clipped before the step; call the "
        "closure yourself, and then optimizer.step()",
        base::Code{"shard-not-with"});
  }
  const auto ranks = ranks_.everyone().size();
  if (model.backwards != nullptr || ranks == 1) return;
  throw base::UsageError(
      base::str("optimizer.step() of a DistributedOptimizer in a job of ", ranks,
                " ranks that has no DistributedModel: each would train its parameters apart. Make the model one, and "
                "the optimizer of its parameters"),
      base::Code{"optimizer-no-model"});
}

// The norm that gradients are clipped to.
double Optimizer::limit(const UserOptimizer& user) const {
  if (clip_) return *clip_;
  const bool clips = parameters_.sharding() != nullptr || clips_as_shards_;
  if (clips && config_.sdp_gradient_clipping) return *config_.sdp_gradient_clipping;
  return user.needs_norm() ? std::numeric_limits<double>::max() : kNoClipping;
}

// See [Note: options]; nothing where nobody compares them.
std::string Optimizer::options(const UserOptimizer& user) const {
  if (ranks_.everyone().size() == 1 || !parameters_.are_cut()) return "";
  std::ostringstream own;
  own.precision(12);
  own << "the number of the optimizer = " << number_ << "\nthe loss scale = " << scale_->value() << "\n"
      << faces::said("broken-off", broken_off_) << "\nthe norm given to clip_master_grads() = ";
  clip_ ? own << *clip_ : own << "none";
  return base::str(own.str(), "\n", user.options(/*counts=*/ranks_.one_copy().size() == 1));
}

std::vector<base::Rank> Optimizer::trained_with(const ModelInUse& model) const {
  return distributed_optimizer::trained_with(ranks_, config_, has_copies(model));
}

// Says what gradients there are, where some are not of scaled losses: on the rank where backwards begin.
Unscaled Optimizer::unscaled(const UserOptimizer& user, const ModelInUse& model) const {
  if (!scale_->is_on() || !ranks_.leads()) return Unscaled::kNone;
  const auto* backwards = model.backwards;
  if (backwards != nullptr && backwards->plain() > std::max(plain_, backwards->plain_forgotten())) {
    return Unscaled::kSome;
  }
  if (backwards_ != (backwards == nullptr ? 0 : backwards->count())) return Unscaled::kNone;
  const auto members = user.members();
  const bool any =
      std::ranges::any_of(members, [this](const auto& member) { return parameters_.source(member).grad().defined(); });
  return any ? Unscaled::kAll : Unscaled::kNone;
}

void Optimizer::measure(UserOptimizer& user, const ModelInUse& model) {
  begun_ = {.factor = 1 / scale_->value()};
  const double limit = this->limit(user);
  const auto options = this->options(user);
  const auto trained = trained_with(model);
  if (parameters_.sharding() == nullptr && !scale_->is_on() && limit == kNoClipping) {
    if (parameters_.are_cut()) require_alike(options, trained, ranks_);
    return;
  }
  std::vector<at::Tensor> sources;
  for (const auto& member : user.members()) sources.push_back(parameters_.source(member));
  const Measurers measurers{.table = parameters_.table(),
                            .sharding = parameters_.sharding(),
                            .one_copy = ranks_.one_copy(),
                            .pipeline = ranks_.pipeline(),
                            .copies = has_copies(model) ? ranks_.of_copies() : std::vector{ranks_.own},
                            .trains_with_copies = config_.ddp,
                            .options = hash_of_options(options),
                            .unscaled = unscaled(user, model),
                            .mailbox = ranks_.mailbox,
                            .patience = ranks_.patience()};
  const auto measure = measure_gradients(sources, measurers, *optim::shared_threads());
  if (!measure.are_alike && parameters_.are_cut()) tell_difference(options, trained, ranks_);
  require_scaled(measure.unscaled);
  begun_.norm = measure.norm / scale_->value();
  begun_.overflow = scale_->is_on() && measure.overflow;
  begun_.clipped_norm = begun_.norm;
  if (begun_.overflow) return;  // nothing is clipped in a step that is left out
  const double clip = limit / (begun_.norm + kEpsilon);
  if (clip >= 1) return;
  begun_.factor *= clip;
  begun_.clipped_norm *= clip;
  if (!clip_ && parameters_.sharding() != nullptr && std::isfinite(begun_.norm)) tell_of_clipping();
}

void Optimizer::require_scaled(Unscaled unscaled) const {
  if (unscaled == Unscaled::kNone) return;
  throw base::UsageError(
      base::str("the optimizer has a loss scale (", scale_->value(), "), and divides gradients by it, but ",
                unscaled == Unscaled::kSome ? "some came from a loss.backward()" : "there was no model.backward()",
                " since its last zero_grad(): call model.backward(loss), which multiplies the loss by it, in the place "
                "of each loss.backward()"),
      base::Code{"optimizer-not-scaled"});
}

// Once, by the job's first rank.
void Optimizer::tell_of_clipping() {
  if (!std::exchange(tells_of_clipping_, false) || ranks_.own != base::Rank(0)) return;
  base::log_warning(base::str("gradients of norm ", begun_.norm, " were clipped to ", begun_.clipped_norm,
                              ", the default of sdp_gradient_clipping, as larger ones are in every step; set that key "
                              "to the norm that you mean (null clips nothing)"));
}

void Optimizer::update(UserOptimizer& user) {
  const bool as_is = user.takes_any_gradient();
  ++broken_off_;
  try {
    parameters_.begin_step(user.members(), begun_.factor, as_is);
    if (updated_) updated_(user, groups_.members(user), parameters_.table(), as_is ? begun_.factor : 1);
    const UpdateTerms terms{as_is ? begun_.factor : 1, begun_.clipped_norm, &parameters_, {}};
    user.needs() == fused::Needs::kWhole ? update_wholes(user, terms) : user.update(terms);
    parameters_.end_step(as_is, scale_->value());
  } catch (...) {
    parameters_.abandon_step();
    throw;
  }
  beside_.bring();
  --broken_off_;
  scale_->update(false);
}

// Wholes are in the places of parts, with their states, for as long as the update takes: see [Note: owners].
void Optimizer::update_wholes(UserOptimizer& user, const UpdateTerms& terms) {
  const auto in_step = parameters_.begin_wholes(user.members());
  std::size_t next = 0;
  std::vector<std::vector<at::Tensor>> parts, wholes;
  std::vector<UserOptimizer::Moved> to_wholes, to_parts;
  for (const auto& group : user.groups()) {
    auto& before = parts.emplace_back();
    auto& now = wholes.emplace_back();
    for (const auto& [part, given] : group) {
      before.push_back(part);
      const auto& whole = in_step[next++];
      if (!whole.defined()) continue;
      now.push_back(whole);
      if (whole.is_same(part)) continue;
      to_wholes.push_back({part, whole});
      to_parts.push_back({whole, part});
    }
  }
  std::exception_ptr error;
  try {
    user.exchange(wholes, to_wholes);
    user.update(terms);
    parameters_.end_wholes();
  } catch (...) {
    error = std::current_exception();
  }
  user.exchange(parts, to_parts);
  parameters_.forget_wholes();
  if (error) std::rethrow_exception(error);
}

}  // namespace lamina::distributed_optimizer
