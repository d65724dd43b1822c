// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/local_parameters.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/layout/place.h"
#include "lamina/model/make_table.h"

namespace lamina::distributed_optimizer {
namespace {

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
    : ranks_(std::move(ranks)),
      slice_ranks_(ranks_),
      divided_over_(model::updates_divided_over(ranks_.topology, config)),
      replaces_(model::updates_masters(config) || divided_over_) {
  if (divided_over_ == topology::kSameParts) hold_in(ranks_.groups.get(topology::kSameParts, ranks_.patience()));
}

void LocalParameters::hold_in(collective::Group& group) {
  shard_ranks_ = std::make_unique<ShardRanks>(group, ranks_.patience());
}

void LocalParameters::set_model(Table table, std::shared_ptr<sharding::Sharding> sharding) {
  are_cut_ = true;
  table_ = std::move(table);
  if (sharding && !shard_ranks_) hold_in(sharding->group());
  sharding_ = std::move(sharding);
}

const model::Parameter* LocalParameters::row_of(const at::Tensor& held, const model::ParameterTable& table) const {
  const auto shard = sharding_ ? sharding_->find_shard(held) : std::nullopt;
  return table.find(shard ? sharding_->named(*shard).parameter : held);
}

at::Tensor LocalParameters::local(const at::Tensor& held, const model::ParameterTable& table) {
  const auto* row = row_of(held, table);
  if (row == nullptr || stand_ins_.find(held) || !(row->has_master() || row->is_divided())) return held;
  if (row->has_master()) require_alone(table, held);
  std::optional<layout::Share> own;
  if (row->is_divided()) {
    const auto region = layout::held(row->update, ranks_.topology, ranks_.place());
    base::internal_check(region.has_value(), "what is updated here is here");
    own = {region->begin, region->end, region->size};
  }
  return stand_ins_.take(held, own, row->has_master());
}

const at::Tensor& LocalParameters::source(const at::Tensor& local) const {
  const auto number = stand_ins_.find(local);
  return number ? stand_ins_.of(*number) : local;
}

std::optional<LocalShard> LocalParameters::shard(const at::Tensor& local) const {
  const auto number = stand_ins_.find(local);
  const auto& held = number ? stand_ins_.of(*number) : local;
  if (const auto own = number ? stand_ins_.share(*number) : std::nullopt) return LocalShard{local, held, *own};
  const auto shard = sharding_ ? sharding_->find_shard(held) : std::nullopt;
  if (!shard) return {};
  return LocalShard{local, sharding_->named(*shard).parameter, sharding_->share(*shard)};
}

bool LocalParameters::is_master(const at::Tensor& local) const {
  const auto number = stand_ins_.find(local);
  return number && stand_ins_.is_master(*number);
}

bool LocalParameters::is_beside(const at::Tensor& held, const model::ParameterTable& table) const {
  return row_of(held, table) == nullptr && !stand_ins_.find(held);
}

at::Tensor LocalParameters::gradient(const at::Tensor& stand_in) {
  return stand_ins_.gradient(stand_ins_.find(stand_in).value());
}

void LocalParameters::set_gradient(const at::Tensor& stand_in, const at::Tensor& gradient) {
  const auto shard = sharding_ ? sharding_->find_shard(source(stand_in)) : std::nullopt;
  if (shard && !gradient.defined()) sharding_->zero_grad(*shard, /*set_to_none=*/true);  // and what is summed for it
  stand_ins_.set_gradient(stand_ins_.find(stand_in).value(), gradient);
}

const layout::Slicing* LocalParameters::slicing(const at::Tensor& local) const {
  const auto* table = slice_ranks_.are_several() ? table_() : nullptr;
  const auto* row = table == nullptr ? nullptr : row_of(source(local), *table);
  return row == nullptr || !row->layout.slicing ? nullptr : &*row->layout.slicing;
}

bool LocalParameters::have_slices() const {
  const auto* table = slice_ranks_.are_several() ? table_() : nullptr;
  return table != nullptr &&
         std::ranges::any_of(table->all(), [](const auto& row) { return row.layout.slicing.has_value(); });
}

std::vector<std::int64_t> LocalParameters::sizes_of_whole(const at::Tensor& parameter) const {
  const auto* table = slice_ranks_.are_several() ? table_() : nullptr;
  const auto* row = table == nullptr ? nullptr : table->find(parameter);
  return row == nullptr ? parameter.sizes().vec() : row->layout.shape;
}

at::Tensor LocalParameters::part_of(const at::Tensor& local, const at::Tensor& whole) const {
  const auto is = shard(local);
  const auto* cut = slicing(local);
  const bool is_whole =
      cut != nullptr && whole.numel() == layout::numel(row_of(source(local), *table_())->layout.shape);
  const auto slice = is_whole ? slice_ranks_.part_of(whole, *cut) : whole;
  return is ? shard_ranks_->part_of(*is, slice) : slice;
}

at::Tensor LocalParameters::slice_of(const at::Tensor& local, const at::Tensor& value) const {
  const auto is = shard(local);
  return is ? shard_ranks_->whole_of(*is, value) : value;
}

at::Tensor LocalParameters::whole_of(const at::Tensor& local, const at::Tensor& value) const {
  const auto slice = slice_of(local, value);
  const auto* cut = slicing(local);
  return cut == nullptr ? slice : slice_ranks_.whole_of(slice, *cut);
}

// Steps.

void LocalParameters::begin_step(std::span<const at::Tensor> locals, double factor, bool as_is) {
  const at::NoGradGuard no_grad;
  stand_ins_.give_gradients(factor, as_is);
  in_step_ = true;
  if (as_is || factor == 1) return;
  for (const auto& local : locals) {
    auto& gradient = local.mutable_grad();
    const bool writable = gradient.defined() && !gradient._is_zerotensor();  // zeros without memory stay zeros
    if (!stand_ins_.find(local) && writable) multiplied_.emplace_back(gradient.mul_(factor), factor);
  }
}

void LocalParameters::abandon_step() {
  const at::NoGradGuard no_grad;
  if (std::exchange(in_step_, false)) stand_ins_.forget_gradients();
  for (auto& [gradient, factor] : std::exchange(multiplied_, {})) gradient.mul_(1 / factor);
}

void LocalParameters::update(const optim::Functional& functional, std::span<optim::GroupStep> groups,
                             optim::Threads& threads) const {
  std::vector<optim::Update*> parts;
  std::vector<SlicedUpdate> slices;
  const auto& norms = functional.declaration().norms;
  for (auto& group : groups) {
    for (auto& each : group.updates) {
      if (const auto number = stand_ins_.find(*each.parameter)) each.copy = stand_ins_.half_copy(*number);
      if (const auto is = shard(*each.parameter)) {
        each.elements = is->share.count();
        parts.push_back(&each);
      }
      if (const auto* cut = norms.empty() ? nullptr : slicing(*each.parameter)) slices.push_back({&each, cut->degree});
    }
  }
  optim::step_groups(functional, groups, threads, [&] {
    if (shard_ranks_) shard_ranks_->combine(parts, norms);
    slice_ranks_.combine(slices, norms);
  });
}

void LocalParameters::end_step(bool as_is, double scale) {
  const at::NoGradGuard no_grad;
  stand_ins_.write_back(as_is);
  for (auto& [gradient, factor] : std::exchange(multiplied_, {})) {
    if (scale != 1) gradient.mul_(scale);
  }
  abandon_step();
  std::vector<at::Tensor> divided;
  for (std::size_t i = 0; i < stand_ins_.size(); ++i) {
    if (stand_ins_.share(i)) divided.push_back(stand_ins_.of(i));
  }
  if (!divided.empty()) shard_ranks_->gather(divided);
  stand_ins_.settle();
  if (sharding_) sharding_->after_update();
}

void LocalParameters::share_written() {
  const auto numbers = stand_ins_.written();
  if (numbers.empty()) return;
  std::vector<at::Tensor> parameters;
  for (const auto number : numbers) parameters.push_back(stand_ins_.of(number));
  shard_ranks_->gather(parameters);
  for (const auto number : numbers) stand_ins_.settle(number);
}

Owners::Held LocalParameters::held(const at::Tensor& local) const {
  auto part = shard(local);
  const auto* cut = slicing(local);
  const auto elements = cut != nullptr ? layout::numel(row_of(source(local), *table_())->layout.shape)
                                       : (part ? part->parameter : local).numel();
  return {std::move(part), cut, elements};
}

void LocalParameters::spread_wholes(std::span<const at::Tensor> locals) {
  if (!shard_ranks_ && !slice_ranks_.are_several()) return;
  if (!owners_) owners_.emplace(shard_ranks_.get(), slice_ranks_);
  owners_->spread(locals, [this](const at::Tensor& local) { return held(local); });
}

bool LocalParameters::updates_whole(const at::Tensor& local) const { return owners_ && owners_->owns(local); }

std::vector<at::Tensor> LocalParameters::begin_wholes(std::span<const at::Tensor> locals) {
  if (!owners_) return {locals.begin(), locals.end()};
  return owners_->begin(locals, [this](const at::Tensor& local) { return held(local); });
}

void LocalParameters::end_wholes() {
  if (owners_) owners_->end();
}

void LocalParameters::forget_wholes() {
  if (owners_) owners_->forget();
}

}  // namespace lamina::distributed_optimizer
