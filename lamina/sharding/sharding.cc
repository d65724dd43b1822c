// SPDX-License-Identifier: Apache-2.0
#include "lamina/sharding/sharding.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/sharding/same_order.h"

namespace lamina::sharding {
namespace {

std::vector<Sharded> specs_of(std::span<const model::Parameter* const> parameters) {
  std::vector<Sharded> specs;
  for (const auto* row : parameters) {
    const auto& tensor = row->tensor;
    specs.push_back({tensor.numel(), tensor.scalar_type(), tensor.device()});
  }
  return specs;
}

// A sum of half precision may be too large where the mean is not: what is summed is divided before.
bool is_half(const at::Tensor& tensor) { return tensor.element_size() < 4; }

constexpr double kEpsilon = 1e-6;  // torch's, of a norm that gradients are divided by

// In the tensor's own precision, at least float32.
double norm_of(const at::Tensor& tensor, double norm_type) {
  const at::NoGradGuard no_grad;
  const auto type = is_half(tensor) ? std::optional(at::kFloat) : std::nullopt;
  return at::linalg_vector_norm(tensor, norm_type, {}, false, type).item<double>();
}

}  // namespace

std::vector<const model::Parameter*> sharded(const model::ParameterTable& table) {
  std::vector<const model::Parameter*> rows;
  for (const auto* row : table.here()) {
    if (row->layout.shards > 1) rows.push_back(row);
  }
  return rows;
}

void mark_shards(std::span<model::Parameter> rows, int degree, std::int64_t threshold) {
  std::unordered_map<const void*, int> sharers;  // of memory
  for (const auto& row : rows) ++sharers[value::memory_of(row.tensor)];
  for (auto& row : rows) {
    const auto& tensor = row.tensor;
    const auto* memory = value::memory_of(tensor);  // none yet where the value is delayed, which is alone in its own
    const bool alone = memory == nullptr ||
                       (sharers[memory] == 1 && tensor.storage_offset() == 0 && memory->nbytes() == tensor.nbytes());
    row.layout.shards = !row.layout.buffer && alone && model::may_be_sharded(tensor, threshold) ? degree : 1;
  }
}

Sharding::Sharding(std::span<const model::Parameter* const> parameters, std::span<const std::string> modules,
                   Limits limits, Parts parts)
    : parts_(std::move(parts)) {
  for (const auto* row : parameters) parameters_.push_back({row->layout.name, row->tensor});
  const auto on_cpu = [](const auto* row) { return row->tensor.is_cpu(); };
  if (std::ranges::all_of(parameters, on_cpu)) {
    const auto check_members = [&mailbox = parts_.mailbox, members = parts_.group.members()] {
      if (const auto loss = mailbox.loss(members, {})) {
        throw base::PeerError(base::str("summing gradients: ", loss->text()), loss, base::Code{"group-lost"});
      }
    };
    transfer_ = make_shared_transfer(specs_of(parameters), limits.gradients, parts_.group,
                                     {"sharding the model", parts_.patience}, check_members);
  }
  if (!transfer_ && parts_.pipeline.size() > 1) {
    throw base::UsageError(
        "sharded_data_parallel_degree with several partitions needs sharding groups whose ranks share memory (on one "
        "host, with ddp_dist_backend \"auto\"): they run microbatches in orders of their own, and collectives have "
        "one. Set pipeline_parallel_degree to 1, or a placement_strategy that puts each sharding group on one host",
        base::Code{"shard-no-memory"});
  }
  if (!transfer_) {
    std::vector<std::string> names;
    for (const auto& each : parameters_) names.push_back(each.name);
    transfer_ = make_collective_transfer(
        specs_of(parameters), limits.gradients, parts_.group, parts_.patience,
        std::make_unique<SameOrder>(parts_.mailbox, parts_.group.members(), parts_.group.rank(), std::move(names)));
  }
  for (std::size_t i = 0; i < size(); ++i) by_shard_[shard(i).unsafeGetTensorImpl()] = i;
  values_ = std::make_shared<LiveValues>(parameters_, modules, limits.live, transfer_);
  value::set_home(values_);
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
    auto shard = transfer_->shard(*parameter);
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

at::Tensor Sharding::part_of(std::size_t parameter, const at::Tensor& whole) {
  const at::NoGradGuard no_grad;
  const auto shard = transfer_->shard(parameter);
  const auto begin = std::min(shard.numel() * parts_.group.rank(), whole.numel());
  const auto valid = std::min(shard.numel(), whole.numel() - begin);
  auto part = at::zeros({shard.numel()}, whole.options());
  part.narrow(0, 0, valid).copy_(whole.detach().reshape({-1}).narrow(0, begin, valid));
  return part;
}

void Sharding::write_back(std::size_t parameter, const at::Tensor& whole) {
  const at::NoGradGuard no_grad;
  shard(parameter).detach().copy_(part_of(parameter, whole));
}

// Gradients.

void Sharding::note(const at::Tensor& parameter, std::int64_t pass) {
  auto gradient = std::exchange(const_cast<at::Tensor&>(parameter).mutable_grad(), {});
  if (!gradient.defined()) return;
  const at::NoGradGuard no_grad;
  gradient = gradient.detach();
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  if (is_half(gradient)) gradient = gradient.div(parts_.replicas());
  transfer_->give(*find(parameter), gradient.contiguous(), pass);
}

void Sharding::reduce(std::int64_t pass, bool ends, const base::Patience& patience) {
  const at::NoGradGuard no_grad;
  transfer_->reduce(pass, patience);
  values_->end_pass();
  if (!ends) return;
  std::vector<at::Tensor> sums;
  for (std::size_t i = 0; i < size(); ++i) sums.push_back(transfer_->take_sum(i));
  if (parts_.copies != nullptr) sum_over_copies(sums, patience);
  for (std::size_t i = 0; i < size(); ++i) {
    if (!sums[i].defined()) continue;
    auto& gradient = shard(i).mutable_grad();
    if (!is_half(sums[i])) sums[i].div_(parts_.replicas());
    if (gradient.defined()) {
      gradient.add_(sums[i]);
    } else {
      gradient = std::move(sums[i]);
    }
  }
}

// Some copies may have a gradient that others lack.
void Sharding::sum_over_copies(std::vector<at::Tensor>& sums, const base::Patience& patience) {
  const collective::Terms terms{"averaging gradients of shards", patience};
  auto present = at::zeros({static_cast<std::int64_t>(size())}, at::kByte);
  auto* flags = present.mutable_data_ptr<std::uint8_t>();
  for (std::size_t i = 0; i < size(); ++i) flags[i] = sums[i].defined() ? 1 : 0;
  parts_.copies->all_reduce(present, collective::Reduction::kMax, terms)->wait();
  std::vector<collective::Started> started;
  for (std::size_t i = 0; i < size(); ++i) {
    if (flags[i] == 0) continue;
    if (!sums[i].defined()) sums[i] = at::zeros_like(shard(i));
    started.push_back(parts_.copies->all_reduce(sums[i], collective::Reduction::kSum, terms));
  }
  for (auto& one : started) one->wait();
}

void Sharding::abandon() {
  transfer_->abandon();
  values_->end_pass();
}

void Sharding::zero_grad(std::size_t parameter, bool set_to_none) {
  transfer_->take_sum(parameter);
  auto& gradient = shard(parameter).mutable_grad();
  if (set_to_none) {
    gradient.reset();
  } else if (gradient.defined()) {
    gradient.zero_();
  }
}

// Updates.

void Sharding::before_update() {
  values_->drop_all_kept();
  meet("updating shards");
}

void Sharding::after_update() {
  for (const auto& each : parameters_) each.parameter.unsafeGetTensorImpl()->bump_version();
  meet("updating shards");
}

std::vector<double> Sharding::sum_before_update(std::vector<double> numbers) {
  values_->drop_all_kept();
  const auto size = static_cast<std::int64_t>(numbers.size());
  const auto tensor = at::from_blob(numbers.data(), {size}, at::kDouble).clone();
  parts_.group.all_reduce(tensor, collective::Reduction::kSum, {"measuring gradients", parts_.patience})->wait();
  const auto* sums = tensor.const_data_ptr<double>();
  return {sums, sums + numbers.size()};
}

std::vector<model::Measured> Sharding::measured(std::vector<model::Measured> pairs, double norm_type) {
  std::vector<at::Tensor> of_shards;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (!find(pairs[i].first)) continue;
    places.push_back(i);
    of_shards.push_back(pairs[i].second);
  }
  if (places.empty()) return pairs;
  const auto of_all = norms(of_shards, norm_type);
  for (std::size_t i = 0; i < places.size(); ++i) {
    auto& part = pairs[places[i]].second;
    if (part.defined()) part = at::full({1}, of_all[i], part.options().requires_grad(false));
  }
  return pairs;
}

// Measures tensors of which each member has such a part; 0 where it is undefined on all members.
std::vector<double> Sharding::norms(std::span<const at::Tensor> parts, double norm_type) {
  const bool largest = std::isinf(norm_type);
  auto powers = at::zeros({static_cast<std::int64_t>(parts.size())}, at::kDouble);
  auto* each = powers.mutable_data_ptr<double>();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!parts[i].defined()) continue;
    const double norm = norm_of(parts[i], norm_type);
    each[i] = largest ? norm : std::pow(norm, norm_type);
  }
  const auto how = largest ? collective::Reduction::kMax : collective::Reduction::kSum;
  parts_.group.all_reduce(powers, how, {"measuring gradients", parts_.patience})->wait();
  std::vector<double> norms(each, each + parts.size());
  for (auto& norm : norms) norm = largest ? norm : std::pow(norm, 1 / norm_type);
  return norms;
}

std::int64_t Sharding::elements(std::size_t parameter) const {
  const auto whole = named(parameter).parameter.numel();
  const auto shard = transfer_->shard(parameter).numel();
  return std::clamp(whole - shard * parts_.group.rank(), std::int64_t{0}, shard);
}

// Exchanges what all members have, and not a reduction: it knows sums and largest values at once, and what is no
// number stays none.
void Sharding::combine(std::span<optim::Update* const> shards, std::span<const fused::Combine> how) {
  if (shards.empty() || how.empty()) return;
  const auto columns = static_cast<std::int64_t>(how.size());
  auto mine = at::empty({std::ssize(shards) * columns}, at::kDouble);
  auto* values = mine.mutable_data_ptr<double>();
  for (const auto* shard : shards) values = std::copy_n(shard->norms.begin(), how.size(), values);
  auto all = at::empty({mine.numel() * parts_.group.size()}, at::kDouble);
  parts_.group.all_gather(all, mine, {"measuring parameters", parts_.patience})->wait();
  const auto* from = all.const_data_ptr<double>();
  for (int member = 0; member < parts_.group.size(); ++member) {
    for (auto* shard : shards) {
      for (std::size_t k = 0; k < how.size(); ++k, ++from) {
        auto& norm = shard->norms[k];
        norm = member == 0 ? *from : fused::combined(how[k], norm, *from);
      }
    }
  }
}

namespace {

// Parts that travel together: those of one type and device, by owner.
struct Parcel {
  at::TensorOptions options;
  std::vector<std::size_t> places;  // in the list
  std::vector<std::int64_t> sizes;  // of a part
  std::vector<std::int64_t> rows;   // elements for each owner
};

std::vector<Parcel> parcels_of(std::span<const Owned> parameters, Transfer& transfer, int members) {
  std::vector<std::size_t> by_owner(parameters.size());
  std::iota(by_owner.begin(), by_owner.end(), 0);
  std::ranges::stable_sort(by_owner, {}, [&](std::size_t place) { return parameters[place].owner; });
  std::vector<Parcel> parcels;
  for (const auto place : by_owner) {
    const auto shard = transfer.shard(parameters[place].parameter);
    auto found = std::ranges::find_if(parcels, [&](const Parcel& parcel) {
      return parcel.options.dtype() == shard.dtype() && parcel.options.device() == shard.device();
    });
    if (found == parcels.end()) {
      const auto options = at::TensorOptions(shard.dtype()).device(shard.device());
      found = parcels.insert(found, {options, {}, {}, std::vector<std::int64_t>(members)});
    }
    found->places.push_back(place);
    found->sizes.push_back(shard.numel());
    found->rows[parameters[place].owner] += shard.numel();
  }
  return parcels;
}

std::int64_t sum_of(const std::vector<std::int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

}  // namespace

std::vector<at::Tensor> Sharding::to_owners(std::span<const Owned> parameters, std::span<const at::Tensor> parts) {
  const at::NoGradGuard no_grad;
  const int members = parts_.group.size(), self = parts_.group.rank();
  std::vector<at::Tensor> wholes(parameters.size());
  for (const auto& parcel : parcels_of(parameters, *transfer_, members)) {
    auto sent = at::zeros({sum_of(parcel.rows)}, parcel.options);
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < parcel.places.size(); begin += parcel.sizes[i++]) {
      const auto& part = parts[parcel.places[i]];
      if (part.defined()) sent.narrow(0, begin, parcel.sizes[i]).copy_(part.detach());
    }
    const auto own = parcel.rows[self];
    auto received = at::empty({members * own}, parcel.options);
    const collective::Terms terms{"gathering parameters on their owners", parts_.patience};
    const std::vector<std::int64_t> from_each(members, own);
    parts_.group.all_to_all(received, sent, terms, {.received = from_each, .sent = parcel.rows})->wait();
    begin = 0;
    for (std::size_t i = 0; i < parcel.places.size(); ++i) {
      const auto& [parameter, owner] = parameters[parcel.places[i]];
      if (owner != self) continue;
      const auto& like = named(parameter).parameter;
      wholes[parcel.places[i]] = received.view({members, own})
                                     .narrow(1, begin, parcel.sizes[i])
                                     .reshape({-1})
                                     .narrow(0, 0, like.numel())
                                     .reshape(like.sizes());
      begin += parcel.sizes[i];
    }
  }
  return wholes;
}

std::vector<at::Tensor> Sharding::from_owners(std::span<const Owned> parameters, std::span<const at::Tensor> wholes) {
  const at::NoGradGuard no_grad;
  const int members = parts_.group.size(), self = parts_.group.rank();
  std::vector<at::Tensor> parts(parameters.size());
  for (const auto& parcel : parcels_of(parameters, *transfer_, members)) {
    const auto own = parcel.rows[self];
    auto sent = at::zeros({members * own}, parcel.options);
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < parcel.places.size(); ++i) {
      const auto place = parcel.places[i];
      if (parameters[place].owner != self) continue;
      auto padded = at::zeros({members * parcel.sizes[i]}, parcel.options);
      padded.narrow(0, 0, wholes[place].numel()).copy_(wholes[place].detach().reshape({-1}));
      sent.view({members, own}).narrow(1, begin, parcel.sizes[i]).copy_(padded.view({members, parcel.sizes[i]}));
      begin += parcel.sizes[i];
    }
    auto received = at::empty({sum_of(parcel.rows)}, parcel.options);
    const collective::Terms terms{"slicing parameters of their owners", parts_.patience};
    const std::vector<std::int64_t> to_each(members, own);
    parts_.group.all_to_all(received, sent, terms, {.received = parcel.rows, .sent = to_each})->wait();
    begin = 0;
    for (std::size_t i = 0; i < parcel.places.size(); begin += parcel.sizes[i++]) {
      parts[parcel.places[i]] = received.narrow(0, begin, parcel.sizes[i]);
    }
  }
  return parts;
}

double Sharding::sum(double mine) {
  auto all = at::empty({parts_.group.size()}, at::kDouble);
  parts_.group.all_gather(all, at::full({1}, mine, at::kDouble), {"measuring gradients", parts_.patience})->wait();
  const auto* each = all.const_data_ptr<double>();
  return std::accumulate(each, each + all.numel(), 0.0);
}

at::Tensor Sharding::gather(std::size_t parameter, const at::Tensor& part) {
  const at::NoGradGuard no_grad;
  const auto& whole = named(parameter).parameter;
  auto all = at::empty({part.numel() * parts_.group.size()}, part.options());
  const collective::Terms terms{"gathering shards", parts_.patience};
  parts_.group.all_gather(all, part.detach().contiguous(), terms)->wait();
  return all.narrow(0, 0, whole.numel()).reshape(whole.sizes());
}

void Sharding::meet(const char* purpose) { parts_.group.barrier({purpose, parts_.patience})->wait(); }

}  // namespace lamina::sharding
