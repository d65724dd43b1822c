// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/local_parameters.h"

#include <c10/core/GradMode.h>

#include <algorithm>

#include "lamina/base/error.h"
#include "lamina/base/str.h"

namespace lamina::distributed_optimizer {
namespace {

using topology::Group;

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

LocalParameters::LocalParameters(collective::Ranks ranks, const config::Config& config)
    : ranks_(std::move(ranks)), config_(config) {
  if (divided_over() == Group::kRdp) hold_in(ranks_.groups.get(Group::kRdp, ranks_.patience()));
}

void LocalParameters::hold_in(collective::Group& group) {
  holders_ = std::make_unique<Holders>(group, ranks_.patience());
}

std::optional<Group> LocalParameters::divided_over() const {
  if (config_.sharded_data_parallel_degree > 1) return Group::kShard;
  if (config_.shard_optimizer_state && ranks_.copies() > 1) return Group::kRdp;
  return {};
}

bool LocalParameters::replaces() const { return config_.fp16 || config_.bf16 || divided_over().has_value(); }

void LocalParameters::set_model(Table table, std::shared_ptr<sharding::Sharding> sharding) {
  are_cut_ = true;
  table_ = std::move(table);
  if (sharding && !holders_) hold_in(sharding->group());
  sharding_ = std::move(sharding);
}

at::Tensor LocalParameters::local(const at::Tensor& held, const model::ParameterTable& table) {
  const bool is_model_s = table.find(held) != nullptr || (sharding_ && sharding_->find_shard(held));
  if (!is_model_s || stand_ins_.find(held)) return held;
  const bool in_float32 = (config_.fp16 || config_.bf16) && is_half(held);
  if (in_float32) require_alone(table, held);
  const auto* sharer = table.sharer(held);
  const bool divided = divides(held) && (sharer == nullptr || sharer->layout.buffer);
  const auto [begin, end] = divided ? holders_->range(held) : std::pair<std::int64_t, std::int64_t>(0, held.numel());
  return in_float32 || divided ? stand_ins_.take(held, begin, end, in_float32) : held;
}

const at::Tensor& LocalParameters::source(const at::Tensor& local) const {
  const auto number = stand_ins_.find(local);
  return number ? stand_ins_.of(*number) : local;
}

// Copies divide what has dimensions, which its states have, too, wherever its elements lie: that may change; but for
// parameters that lie in one memory, which have no stand-ins. A shard is a part already.
bool LocalParameters::divides(const at::Tensor& held) const {
  return divided_over() == Group::kRdp && held.dim() > 0 && held.numel() > 0;
}

std::optional<Part> LocalParameters::part(const at::Tensor& local) const {
  const auto& held = source(local);
  if (!held.is_same(local) && divides(held)) return Part{local, held};
  const auto shard = sharding_ ? sharding_->find_shard(held) : std::nullopt;
  return shard ? std::optional(Part{local, sharding_->named(*shard).parameter}) : std::nullopt;
}

bool LocalParameters::is_master(const at::Tensor& local) const {
  const auto number = stand_ins_.find(local);
  return number && stand_ins_.is_master(*number);
}

bool LocalParameters::is_beside(const at::Tensor& held, const model::ParameterTable& table) const {
  return table.find(held) == nullptr && !(sharding_ && sharding_->find_shard(held)) && !stand_ins_.find(held);
}

at::Tensor LocalParameters::gradient(const at::Tensor& stand_in) {
  return stand_ins_.gradient(stand_ins_.find(stand_in).value());
}

void LocalParameters::set_gradient(const at::Tensor& stand_in, const at::Tensor& gradient) {
  const auto shard = sharding_ ? sharding_->find_shard(source(stand_in)) : std::nullopt;
  if (shard && !gradient.defined()) sharding_->zero_grad(*shard, /*set_to_none=*/true);  // and what is summed for it
  stand_ins_.set_gradient(stand_ins_.find(stand_in).value(), gradient);
}

at::Tensor LocalParameters::part_of(const at::Tensor& local, const at::Tensor& whole) const {
  const auto is = part(local);
  return is ? holders_->part_of(*is, whole) : whole;
}

at::Tensor LocalParameters::whole_of(const at::Tensor& local, const at::Tensor& value) const {
  const auto is = part(local);
  return is ? holders_->whole_of(*is, value) : value;
}

// Steps.

void LocalParameters::begin_step(std::span<const at::Tensor> locals, double factor, bool as_is) {
  const at::NoGradGuard no_grad;
  stand_ins_.give_gradients(factor, as_is);
  if (as_is || factor == 1) return;
  for (const auto& local : locals) {
    auto& gradient = local.mutable_grad();
    const bool writable = gradient.defined() && !gradient._is_zerotensor();  // zeros without memory stay zeros
    if (!stand_ins_.find(local) && writable) multiplied_.emplace_back(gradient.mul_(factor), factor);
  }
}

void LocalParameters::abandon_step() {
  const at::NoGradGuard no_grad;
  for (auto& [gradient, factor] : std::exchange(multiplied_, {})) gradient.mul_(1 / factor);
}

void LocalParameters::update(const optim::Functional& functional, std::span<optim::GroupStep> groups,
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

void LocalParameters::end_step(bool as_is) {
  stand_ins_.write_back(as_is);
  stand_ins_.forget_gradients();
  abandon_step();
  std::vector<at::Tensor> divided;
  for (std::size_t i = 0; i < stand_ins_.size(); ++i) {
    if (const auto& of = stand_ins_.of(i); divides(of)) divided.push_back(of);
  }
  if (!divided.empty()) holders_->gather(divided);
  stand_ins_.settle();
  if (sharding_) sharding_->after_update();
}

void LocalParameters::spread_wholes(std::span<const at::Tensor> locals) {
  if (!holders_) return;
  if (!owners_) owners_.emplace(*holders_);
  owners_->spread(locals, [this](const at::Tensor& local) { return part(local); });
}

bool LocalParameters::updates_whole(const at::Tensor& local) const { return owners_ && owners_->owns(local); }

std::vector<at::Tensor> LocalParameters::begin_wholes(std::span<const at::Tensor> locals) {
  if (!owners_) return {locals.begin(), locals.end()};
  return owners_->begin(locals, [this](const at::Tensor& local) { return part(local); });
}

void LocalParameters::end_wholes() {
  if (owners_) owners_->end();
}

void LocalParameters::forget_wholes() {
  if (owners_) owners_->forget();
}

}  // namespace lamina::distributed_optimizer
