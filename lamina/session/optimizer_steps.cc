// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/optimizer_steps.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/distributed_optimizer/options.h"
#include "lamina/optim/step.h"

namespace lamina::session {
namespace {

using distributed_optimizer::Part;
using topology::Group;

constexpr double kEpsilon = 1e-6;  // torch's, of a norm that gradients are divided by

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// Each master would undo what another one has written to the memory that their parameters have in common.
void require_alone(const model::ParameterTable& table, const at::Tensor& parameter) {
  const auto* other = table.sharer(parameter);
  if (other == nullptr || other->layout.buffer) return;
  throw base::UsageError(
      base::str(table.find(parameter)->layout.name, " and ", other->layout.name,
                " lie in one memory, and with fp16 or bf16 each has a master of its own, whose values would undo the "
                "other's: make them one Parameter (other.weight = module.weight), or give one a copy of the memory"),
      base::Code{"optimizer-shared-memory"});
}

}  // namespace

OptimizerSteps::OptimizerSteps(Session& session, std::shared_ptr<optim::LossScale> scale)
    : session_(session), scale_(std::move(scale)) {
  if (divided_over() == Group::kRdp) hold_in(session.groups().get(Group::kRdp, session.patience()));
}

void OptimizerSteps::hold_in(collective::Group& group) {
  holders_ = std::make_unique<distributed_optimizer::Holders>(group, session_.patience());
}

std::optional<Group> OptimizerSteps::divided_over() const {
  const auto& config = session_.config();
  if (config.sharded_data_parallel_degree > 1) return Group::kShard;
  if (config.shard_optimizer_state && session_.topology().size(Group::kRdp) > 1) return Group::kRdp;
  return {};
}

bool OptimizerSteps::replaces() const {
  return session_.config().fp16 || session_.config().bf16 || divided_over().has_value();
}

void OptimizerSteps::set_model(Table table, std::shared_ptr<sharding::Sharding> sharding) {
  table_ = std::move(table);
  if (sharding && !holders_) hold_in(sharding->group());
  sharding_ = std::move(sharding);
}

at::Tensor OptimizerSteps::place_of(const at::Tensor& held) {
  const auto* table = table_();
  const bool is_model_s =
      (table != nullptr && table->find(held) != nullptr) || (sharding_ && sharding_->find_shard(held));
  if (!is_model_s || stand_ins_.find(held)) return held;
  const auto& config = session_.config();
  const bool in_float32 = (config.fp16 || config.bf16) && is_half(held);
  if (in_float32 && table != nullptr) require_alone(*table, held);
  const auto* sharer = table == nullptr ? nullptr : table->sharer(held);
  const bool divided = divides(held) && (sharer == nullptr || sharer->layout.buffer);
  const auto [begin, end] = divided ? holders_->range(held) : std::pair<std::int64_t, std::int64_t>(0, held.numel());
  return in_float32 || divided ? stand_ins_.take(held, begin, end, in_float32) : held;
}

// Copies divide what has dimensions, which its states have, too, wherever its elements lie: that may change; but for
// parameters that lie in one memory, which have no stand-ins. A shard is a part already.
bool OptimizerSteps::divides(const at::Tensor& held) const {
  return divided_over() == Group::kRdp && held.dim() > 0 && held.numel() > 0;
}

std::optional<Part> OptimizerSteps::part(const at::Tensor& place) const {
  const auto number = stand_ins_.find(place);
  const auto& held = number ? stand_ins_.of(*number) : place;
  if (number && divides(held)) return Part{place, held};
  const auto shard = sharding_ ? sharding_->find_shard(held) : std::nullopt;
  return shard ? std::optional(Part{place, sharding_->named(*shard).parameter}) : std::nullopt;
}

bool OptimizerSteps::is_master(const at::Tensor& place) const {
  const auto number = stand_ins_.find(place);
  return number && stand_ins_.is_master(*number);
}

bool OptimizerSteps::is_beside(const at::Tensor& held) const {
  const auto* table = table_();
  if (table == nullptr || table->find(held) != nullptr) return false;
  return !(sharding_ && sharding_->find_shard(held)) && !stand_ins_.find(held);
}

void OptimizerSteps::take_beside(std::span<const at::Tensor> parameters) {
  const auto is_new = [&](const at::Tensor& parameter) {
    return std::ranges::none_of(beside_, [&](const auto& known) { return known.is_same(parameter); });
  };
  std::vector<at::Tensor> taken;
  std::ranges::copy_if(parameters, std::back_inserter(taken), is_new);
  if (taken.empty()) return;
  distributed_optimizer::give_values(taken, session_.members(Group::kWorld), session_.mailbox(), session_.patience());
  beside_.insert(beside_.end(), taken.begin(), taken.end());
}

void OptimizerSteps::bring_beside() const {
  if (beside_.empty()) return;
  distributed_optimizer::give_values(beside_, session_.members(Group::kPp), session_.mailbox(), session_.patience());
}

// Without ddp copies train apart.
std::vector<base::Rank> OptimizerSteps::trained_with(bool copies) const {
  if (table_() == nullptr) return {};
  return session_.members(copies && session_.config().ddp ? Group::kWorld : Group::kPp);
}

void OptimizerSteps::require_alike(const std::string& options, bool with_copies) const {
  const auto ranks = trained_with(with_copies);
  if (ranks.size() < 2) return;
  const auto own = distributed_optimizer::hash_of_options(options);
  const auto told = session_.mailbox().all_gather(ranks, own, session_.patience());
  if (std::ranges::all_of(told, [&](const auto& word) { return word.template as<std::int64_t>() == own; })) return;
  distributed_optimizer::tell_difference(options, ranks, session_.mailbox(), session_.patience());
}

OptimizerSteps::Begun OptimizerSteps::begin(std::span<const at::Tensor> places, double max_norm, bool with_copies,
                                            const std::string& options) {
  give_back_gradients();  // of a step that failed
  Begun begun{.factor = 1 / scale_->value()};
  if (!sharding_ && !scale_->is_on() && max_norm == kNoClipping) {
    require_alike(options, with_copies);
    return begun;
  }
  std::vector<at::Tensor> holders;
  for (const auto& place : places) {
    const auto number = stand_ins_.find(place);
    holders.push_back(number ? stand_ins_.of(*number) : place);
  }
  const distributed_optimizer::Measurers measurers{
      .table = table_(),
      .sharding = sharding_.get(),
      .pipeline = session_.members(Group::kPp),
      .everyone = session_.members(with_copies ? Group::kWorld : Group::kPp),
      .options = distributed_optimizer::hash_of_options(options),
      .mailbox = session_.mailbox(),
      .patience = session_.patience()};
  const auto measure = distributed_optimizer::measure_gradients(holders, measurers, *optim::shared_threads());
  const auto alike = trained_with(with_copies);
  for (std::size_t i = 0; i < measure.options.size(); ++i) {
    if (measure.options[i] == measurers.options || std::ranges::count(alike, measurers.everyone[i]) == 0) continue;
    distributed_optimizer::tell_difference(options, alike, session_.mailbox(), session_.patience());
  }
  begun.norm = measure.norm / scale_->value();
  begun.overflow = scale_->is_on() && measure.overflow;
  begun.clipped_norm = begun.norm;
  if (const double clip = max_norm / (begun.norm + kEpsilon); !(clip >= 1)) {
    begun.factor *= clip;
    begun.clipped_norm *= clip;
  }
  return begun;
}

void OptimizerSteps::leave_out() { scale_->update(true); }

void OptimizerSteps::give_gradients(std::span<const at::Tensor> places, const Begun& begun, bool as_is) {
  const at::NoGradGuard no_grad;
  stand_ins_.give_gradients(begun.factor, as_is);
  if (as_is || begun.factor == 1) return;
  for (const auto& place : places) {
    auto& gradient = place.mutable_grad();
    const bool writable = gradient.defined() && !gradient._is_zerotensor();  // zeros without memory stay zeros
    if (!stand_ins_.find(place) && writable) multiplied_.emplace_back(gradient.mul_(begun.factor), begun.factor);
  }
}

void OptimizerSteps::give_back_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& [gradient, factor] : std::exchange(multiplied_, {})) gradient.mul_(1 / factor);
}

void OptimizerSteps::update(const optim::Functional& functional, std::span<optim::GroupStep> groups,
                            optim::Threads& threads) const {
  std::vector<optim::Update*> parts;
  for (auto& group : groups) {
    for (auto& each : group.updates) {
      if (const auto number = stand_ins_.find(*each.parameter)) each.copy = stand_ins_.half_copy(*number);
      if (const auto is = part(*each.parameter)) {
        each.elements = holders_->elements(*is);
        parts.push_back(&each);
      }
    }
  }
  optim::step_groups(functional, groups, threads, [&] {
    if (holders_) holders_->combine(parts, functional.declaration().norms);
  });
}

void OptimizerSteps::end(bool as_is) {
  stand_ins_.write_back(as_is);
  stand_ins_.forget_gradients();
  give_back_gradients();
  std::vector<at::Tensor> divided;
  for (std::size_t i = 0; i < stand_ins_.size(); ++i) {
    if (const auto& of = stand_ins_.of(i); divides(of)) divided.push_back(of);
  }
  if (!divided.empty()) holders_->gather(divided);
  stand_ins_.settle();
  if (sharding_) sharding_->after_update();
  bring_beside();
  scale_->update(false);
}

void OptimizerSteps::spread_wholes(std::span<const at::Tensor> places) {
  if (!holders_) return;
  if (!owners_) owners_.emplace(*holders_);
  owners_->spread(places, [this](const at::Tensor& place) { return part(place); });
}

bool OptimizerSteps::updates_whole(const at::Tensor& place) const { return owners_ && owners_->owns(place); }

std::vector<at::Tensor> OptimizerSteps::begin_wholes(std::span<const at::Tensor> places) {
  if (!owners_) return {places.begin(), places.end()};
  return owners_->begin(places, [this](const at::Tensor& place) { return part(place); });
}

void OptimizerSteps::end_wholes() {
  if (owners_) owners_->end();
}

void OptimizerSteps::forget_wholes() {
  if (owners_) owners_->forget();
}

at::Tensor OptimizerSteps::part_of(const at::Tensor& place, const at::Tensor& whole) const {
  const auto is = part(place);
  return is ? holders_->part_of(*is, whole) : whole;
}

at::Tensor OptimizerSteps::whole_of(const at::Tensor& place, const at::Tensor& value) const {
  const auto is = part(place);
  return is ? holders_->whole_of(*is, value) : value;
}

}  // namespace lamina::session
