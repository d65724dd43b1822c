// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/sharding.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <malloc.h>

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/collective/travel.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"
#include "lamina/layout/place.h"
#include "lamina/value/guarded.h"
#include "lamina/value/released.h"

namespace lamina::sharding {
namespace {

Spec spec_of(const at::Tensor& tensor, std::optional<at::ScalarType> travels) {
  const auto type = tensor.scalar_type();
  return {tensor.numel(), type, devices::rank_device(), collective::travelling(type, travels)};
}

bool is_half(const at::Tensor& tensor) { return tensor.element_size() < 4; }

constexpr double kEpsilon = 1e-6;  // torch's, of a norm that gradients are divided by

bool has_elements(const at::Tensor& tensor) { return tensor.defined() && tensor.numel() > 0; }

// The norms of those that have elements: a device is waited for once, however many there are.
std::vector<double> norms_of(std::span<const at::Tensor> tensors, double norm_type) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const auto& tensor : tensors) {
    if (!has_elements(tensor)) continue;
    const auto norm = model::norm_of(tensor, norm_type).to(at::kDouble);
    norms.push_back(norms.empty() ? norm : norm.to(norms.front().device()));
  }
  if (norms.empty()) return {};
  const auto known = at::stack(norms).to(devices::kHost);
  return {known.const_data_ptr<double>(), known.const_data_ptr<double>() + known.numel()};
}

}  // namespace

std::vector<const model::Parameter*> sharded(const model::ParameterTable& table) {
  std::vector<const model::Parameter*> rows;
  for (const auto* row : table.here()) {
    if (row->layout.shards > 1) rows.push_back(row);
  }
  return rows;
}

Sharding::Sharding(std::span<const model::Parameter* const> parameters, std::span<const std::string> units,
                   Options options, ShardingContext context)
    : context_(std::move(context)), patience_(context_.ranks.patience()) {
  const auto& ranks = context_.ranks;
  for (const auto* row : parameters) {
    const auto own = layout::held(row->layout, ranks.topology, ranks.place());
    base::internal_check(own.has_value(), "a shard of what is here");
    parameters_.push_back({row->layout.name, row->tensor, {own->begin, own->end, own->size}, row->reduction.divisor});
    specs_.push_back(spec_of(row->tensor, context_.travels));
    // Keeps what a master is updated with: it is not rounded to the type of the parameter.
    kept_.push_back(specs_.back().travels && row->has_master() ? at::kFloat : specs_.back().dtype);
  }
  if (devices::is_host(devices::rank_device())) {
    transfer_ = make_shared_transfer(specs_, options.gradients, context_.group, {"sharding the model", patience_},
                                     &ranks.mailbox);
  }
  if (!transfer_ && !context_.in_order) {
    throw base::InternalError("sharding without common memory, and no order of turns");
  }
  if (!transfer_) {
    std::vector<std::string> names;
    for (const auto& each : parameters_) names.push_back(each.name);
    transfer_ = make_collective_transfer(
        specs_, options.gradients, context_.group, patience_,
        std::make_unique<collective::SameOrder>(ranks.mailbox, context_.group.members(), context_.group.rank(),
                                                words_of(std::move(names)), context_.turn));
  }
  for (std::size_t i = 0; i < size(); ++i) by_shard_[shard(i).unsafeGetTensorImpl()] = i;
  values_ = std::make_shared<LiveValues>(parameters_, units, options.keeping, transfer_);
  value::set_home(values_);
}

Transfer& Sharding::transfer() const {
  if (!transfer_) {
    throw base::UsageError("a shard of a model whose job was shut down", base::Code{"step-after-shutdown"});
  }
  return *transfer_;
}

std::optional<std::size_t> Sharding::find_shard(const at::Tensor& shard) const {
  const auto found = by_shard_.find(shard.unsafeGetTensorImpl());
  return found == by_shard_.end() ? std::nullopt : std::optional(found->second);
}

void Sharding::take(std::span<const model::Parameter> rows) {
  const at::NoGradGuard no_grad;
  for (const auto& row : rows) {
    const auto parameter = find(row.tensor);
    if (!parameter) continue;
    auto shard = transfer().shard(*parameter);
    shard.copy_(part_of(*parameter, row.tensor));
    shard.set_requires_grad(row.tensor.requires_grad());
    // A value that was delayed may lie in a larger one's memory.
    if (value::memory_of(row.tensor)->nbytes() != row.tensor.nbytes()) {
      row.tensor.unsafeGetTensorImpl()->shallow_copy_from(row.tensor.detach().clone().getIntrusivePtr());
    }
    values_->send_away(*parameter);
  }
}

void Sharding::begin() {
#ifdef __GLIBC__
  ::malloc_trim(0);  // gives the system what the whole values took
#endif
  meet("sharding the model");
}

void Sharding::close() {
  if (!transfer_) return;
  values_->close();
  for (std::size_t i = 0; i < size(); ++i) {
    value::send_away(shard(i), base::str("the shard of ", named(i).name,
                                         " is gone with its job, which was shut down: model.state_dict(), and "
                                         "optimizer.state_dict(), have it before"));
  }
  forget();
}

void Sharding::let_go(const std::string& why) {
  values_->close();
  for (std::size_t i = 0; i < size(); ++i) {
    auto shard = this->shard(i);
    value::release(shard, base::str("the shard of ", named(i).name, why));
  }
  forget();
}

void Sharding::forget() {
  by_shard_.clear();
  parameters_.clear();
  transfer_.reset();
}

const layout::Share& Sharding::share(std::size_t parameter) const {
  transfer();
  return named(parameter).share;
}

at::Tensor Sharding::part_of(std::size_t parameter, const at::Tensor& whole) {
  const at::NoGradGuard no_grad;
  const value::Unguarded own_work;
  const auto& own = share(parameter);
  auto part = at::zeros({own.size}, whole.options());
  part.narrow(0, 0, own.count()).copy_(whole.detach().reshape({-1}).narrow(0, own.begin, own.count()));
  return part;
}

void Sharding::write_back(std::size_t parameter, const at::Tensor& whole) {
  const at::NoGradGuard no_grad;
  shard(parameter).detach().copy_(part_of(parameter, whole));
}

// Gradients.

// A sum of half precision may be too large where the mean is not: what is summed is divided before.
bool Sharding::divides_first(std::size_t parameter) const {
  return c10::elementSize(specs_[parameter].gradient_type()) < 4;
}

void Sharding::note(const at::Tensor& parameter, std::int64_t pass) {
  auto gradient = std::exchange(const_cast<at::Tensor&>(parameter).mutable_grad(), {});
  if (!gradient.defined()) return;
  const at::NoGradGuard no_grad;
  gradient = gradient.detach();
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  // Members read its memory, in which its elements have to be.
  gradient = gradient._is_zerotensor() ? gradient.clone() : gradient.resolve_neg();
  const auto number = *find(parameter);
  const int divisor = divides_first(number) ? named(number).replicas : 1;
  if (const auto type = specs_[number].travels) {
    gradient = collective::to_travel(gradient, *type, divisor);
  } else if (divisor != 1) {
    gradient = gradient.div(divisor);
  }
  transfer().give(number, gradient.contiguous(), pass);
}

void Sharding::reduce(std::int64_t pass, bool ends, const base::Patience& patience) {
  const at::NoGradGuard no_grad;
  transfer().reduce(pass, patience);
  values_->end_pass();
  if (!ends) return;
  std::vector<at::Tensor> sums;
  for (std::size_t i = 0; i < size(); ++i) sums.push_back(transfer().take_sum(i));
  if (context_.copies != nullptr) sum_over_copies(sums, patience);
  for (std::size_t i = 0; i < size(); ++i) {
    if (!sums[i].defined()) continue;
    auto& gradient = shard(i).mutable_grad();
    if (!divides_first(i)) sums[i].div_(named(i).replicas);
    if (gradient.defined()) {
      gradient.add_(sums[i]);
    } else {
      gradient = sums[i].to(kept_[i]);
    }
  }
}

// Some copies may have a gradient that others lack.
void Sharding::sum_over_copies(std::vector<at::Tensor>& sums, const base::Patience& patience) {
  const collective::CallOptions options{"averaging gradients of shards", patience};
  auto present = at::zeros({static_cast<std::int64_t>(size())}, at::kByte);
  auto* flags = present.mutable_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < size(); ++i) flags[i] = sums[i].defined() ? 1 : 0;
  context_.copies->all_reduce(present, collective::Reduction::kMax, options)->wait();
  std::vector<collective::Started> started;
  for (std::size_t i = 0; i < size(); ++i) {
    if (flags[i] == 0) continue;
    if (!sums[i].defined()) sums[i] = at::zeros_like(shard(i), specs_[i].sum_type());
    started.push_back(specs_[i].travels
                          ? collective::all_reduce_as(*specs_[i].travels, sums[i], 1, *context_.copies, options)
                          : context_.copies->all_reduce(sums[i], collective::Reduction::kSum, options));
  }
  for (auto& one : started) one->wait();
}

void Sharding::abandon(const value::Failure& failure) {
  transfer().abandon(failure);
  values_->leave_pass();
}

void Sharding::end_together(const std::optional<value::Failure>& failure) {
  try {
    transfer().end_together(failure);
  } catch (...) {
    values_->leave_pass();
    throw;
  }
  if (failure) values_->leave_pass();
}

void Sharding::zero_grad(std::size_t parameter, bool set_to_none) {
  transfer().take_sum(parameter);
  const_cast<at::Tensor&>(named(parameter).parameter).mutable_grad().reset();
  auto& gradient = shard(parameter).mutable_grad();
  if (set_to_none) {
    gradient.reset();
  } else if (gradient.defined()) {
    gradient.zero_();
  }
}

// Updates.

void Sharding::before_update() {
  values_->before_update();
  meet("updating shards");
}

void Sharding::after_update() {
  for (const auto& each : parameters_) each.parameter.unsafeGetTensorImpl()->bump_version();
  meet("updating shards");
}

std::vector<double> Sharding::sum_before_update(std::vector<double> numbers) {
  for (const auto& each : parameters_) {
    if (!each.parameter.grad().defined()) continue;
    throw base::UsageError(base::str("the gradient of ", each.name,
                                     " was set by hand, which no optimizer sees: it is sharded; set this rank's part, "
                                     "parameter.ds_tensor.grad, in its place"),
                           base::Code{"shard-gradient-set"});
  }
  values_->before_update();
  const auto size = static_cast<std::int64_t>(numbers.size());
  const auto tensor = at::from_blob(numbers.data(), {size}, at::kDouble).clone();
  caught_up().all_reduce(tensor, collective::Reduction::kSum, {"measuring gradients", patience_})->wait();
  const auto* sums = tensor.const_data_ptr<double>();
  return {sums, sums + numbers.size()};
}

std::vector<model::Measured> Sharding::measured(std::vector<model::Measured> pairs, double norm_type) {
  const value::Unguarded own_work;
  std::unordered_map<const at::TensorImpl*, std::size_t> by_gradient;
  for (std::size_t i = 0; i < size(); ++i) {
    if (const auto& gradient = shard(i).grad(); gradient.defined()) by_gradient[gradient.unsafeGetTensorImpl()] = i;
  }
  std::vector<std::size_t> places;
  std::vector<at::Tensor> parts;  // without what pads them
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    auto& [parameter, part] = pairs[i];
    const auto own = by_gradient.find(parameter.unsafeGetTensorImpl());
    const auto number = own == by_gradient.end() ? find(parameter) : std::optional(own->second);
    if (!number || part.is_same(parameter) != (own != by_gradient.end()))
      continue;  // a whole value is measured as it is
    parameter = named(*number).parameter;
    places.push_back(i);
    parts.push_back(part.defined() ? part.detach().reshape({-1}).narrow(0, 0, share(*number).count()) : part);
  }
  if (places.empty()) return pairs;
  const auto of_all = norms(parts, norm_type);
  for (std::size_t i = 0; i < places.size(); ++i) {
    auto& part = pairs[places[i]].second;
    if (!part.defined()) continue;
    const auto options = part.options().requires_grad(false);
    part = at::full({1}, of_all[i], is_half(part) ? options.dtype(at::kFloat) : options);
  }
  return pairs;
}

// Measures tensors of which each member has such a part, the same bits on all; of one that is undefined or empty on all
// members, the norm of nothing.
std::vector<double> Sharding::norms(std::span<const at::Tensor> parts, double norm_type) {
  const auto count = static_cast<std::int64_t>(parts.size());
  const double of_nothing = norm_type < 0 ? std::numeric_limits<double>::infinity() : 0;
  const auto mine = at::full({count}, of_nothing, at::kDouble);
  const auto here = norms_of(parts, norm_type);
  std::size_t next = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (has_elements(parts[i])) mine.mutable_data_ptr<double>()[i] = here[next++];
  }
  const auto all = at::empty({context_.group.size(), count}, mine.options());
  caught_up().all_gather(all, mine, {"taking norms", patience_})->wait();
  // Each is of order 0 the number of elements that are not 0.
  const auto norms = norm_type == 0 ? all.sum(0) : at::linalg_vector_norm(all, norm_type, at::IntArrayRef{0});
  const auto* begin = norms.const_data_ptr<double>();
  return {begin, begin + count};
}

at::Tensor Sharding::gather(std::size_t parameter, const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  const auto& whole = named(parameter).parameter;
  auto all = at::empty({part.numel() * context_.group.size()}, part.options());
  const collective::CallOptions options{"gathering shards", patience_};
  caught_up().all_gather(all, part.detach().contiguous(), options)->wait();
  return all.narrow(0, 0, whole.numel()).reshape(whole.sizes());
}

collective::Group& Sharding::caught_up() {
  transfer().catch_up();
  return context_.group;
}

void Sharding::meet(const char* purpose) { caught_up().barrier({purpose, patience_})->wait(); }

}  // namespace lamina::sharding
