// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/shard_ranks.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>

#include "lamina/value/guarded.h"

namespace lamina::distributed_optimizer {
namespace {

constexpr std::int64_t kPortionBytes = std::int64_t{32} << 20;

bool are_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

}  // namespace

void ShardRanks::gather(std::span<const at::Tensor> parameters) {
  while (!parameters.empty()) {
    std::size_t count = 0;
    std::int64_t bytes = 0;
    while (count < parameters.size() && are_alike(parameters[count], parameters[0]) && bytes < kPortionBytes) {
      bytes += static_cast<std::int64_t>(parameters[count++].nbytes());
    }
    gather_portion(parameters.first(count));
    parameters = parameters.subspan(count);
  }
}

at::Tensor ShardRanks::scratch(std::size_t number, std::int64_t length, const at::TensorOptions& options) {
  auto& memory = scratch_.at(number);
  const auto bytes = length * static_cast<std::int64_t>(options.dtype().itemsize());
  if (!memory.defined() || memory.numel() < bytes || memory.device() != options.device()) {
    memory = at::empty({bytes}, at::TensorOptions(at::kByte).device(options.device()));
  }
  return memory.narrow(0, 0, bytes).view(c10::typeMetaToScalarType(options.dtype()));
}

void ShardRanks::gather_portion(std::span<const at::Tensor> parameters) {
  const at::NoGradGuard no_grad;
  const value::Unguarded own_work;
  std::int64_t length = 0;
  for (const auto& parameter : parameters) length += share(parameter, rank()).size;
  const auto options = parameters[0].options().requires_grad(false);
  const auto mine = scratch(0, length, options);
  std::int64_t at = 0;
  for (const auto& parameter : parameters) {
    const auto own = share(parameter, rank());
    mine.narrow(0, at, own.count()).copy_(parameter.detach().reshape({-1}).narrow(0, own.begin, own.count()));
    at += own.size;
  }
  const auto all = scratch(1, length * group_.size(), options);
  group_.all_gather(all, mine, {"gathering updated parameters", patience_})->wait();
  at = 0;
  for (const auto& parameter : parameters) {
    // One whose elements lie on one another has no gradient, so that nobody has updated it.
    const bool updated = at::has_internal_overlap(parameter) != at::MemOverlap::Yes;
    const auto flat = parameter.detach().reshape({-1});  // a copy where its elements are in another order
    for (int member = 0; updated && member < group_.size(); ++member) {
      const auto [begin, end, size] = share(parameter, member);
      if (member != rank()) flat.narrow(0, begin, end - begin).copy_(all.narrow(0, member * length + at, end - begin));
    }
    if (updated && !flat.is_alias_of(parameter)) parameter.detach().copy_(flat.view(parameter.sizes()));
    at += share(parameter, rank()).size;
  }
}

at::Tensor ShardRanks::part_of(const LocalShard& part, const at::Tensor& whole) const {
  const at::NoGradGuard no_grad;
  const value::Unguarded own_work;
  const auto count = part.share.count();
  auto own = at::zeros({part.own.numel()}, whole.options().requires_grad(false));
  own.narrow(0, 0, count).copy_(whole.detach().reshape({-1}).narrow(0, part.share.begin, count));
  return own;
}

at::Tensor ShardRanks::whole_of(const LocalShard& part, const at::Tensor& value) const {
  const at::NoGradGuard no_grad;
  const auto options = value.options().requires_grad(false);
  const auto mine = at::zeros({part.share.size}, options);
  mine.narrow(0, 0, value.numel()).copy_(value.detach().reshape({-1}));
  const auto all = at::empty({mine.numel() * group_.size()}, options);
  group_.all_gather(all, mine, {"gathering states of an optimizer", patience_})->wait();
  return all.narrow(0, 0, part.parameter.numel()).reshape(part.parameter.sizes());
}

// Exchanges what all members have, and not a reduction: it knows sums and largest values at once, and what is no
// number stays none.
void ShardRanks::combine(std::span<optim::Update* const> parts, std::span<const fused::Combine> how) const {
  if (parts.empty() || how.empty()) return;
  const auto columns = static_cast<std::int64_t>(how.size());
  auto mine = at::empty({std::ssize(parts) * columns}, at::kDouble);
  auto* values = mine.mutable_data_ptr<double>();
  for (const auto* part : parts) values = std::copy_n(part->norms.begin(), how.size(), values);
  auto all = at::empty({mine.numel() * group_.size()}, at::kDouble);
  group_.all_gather(all, mine, {"measuring parameters", patience_})->wait();
  const auto* from = all.const_data_ptr<double>();
  for (int member = 0; member < group_.size(); ++member) {
    for (auto* part : parts) {
      for (std::size_t k = 0; k < how.size(); ++k, ++from) {
        auto& norm = part->norms[k];
        norm = member == 0 ? *from : fused::combined(how[k], norm, *from);
      }
    }
  }
}

std::vector<std::uint8_t> ShardRanks::any(std::vector<std::uint8_t> given) const {
  auto flags = at::empty({std::ssize(given)}, at::kByte);
  std::ranges::copy(given, flags.mutable_data_ptr<std::uint8_t>());
  group_.all_reduce(flags, collective::Reduction::kMax, {"telling which parameters have gradients", patience_})->wait();
  std::copy_n(flags.const_data_ptr<std::uint8_t>(), given.size(), given.begin());
  return given;
}

// Owners.

struct ShardRanks::Parcel {
  at::TensorOptions options;
  std::vector<std::size_t> numbers;  // in the list
  std::vector<std::int64_t> sizes;   // of a share
  std::vector<std::int64_t> rows;    // elements for each owner

  std::int64_t numel() const { return std::accumulate(rows.begin(), rows.end(), std::int64_t{0}); }
};

std::vector<ShardRanks::Parcel> ShardRanks::parcels_of(std::span<const OwnedShard> parts) const {
  std::vector<std::size_t> by_owner(parts.size());
  std::iota(by_owner.begin(), by_owner.end(), 0);
  std::ranges::stable_sort(by_owner, {}, [&](std::size_t number) { return parts[number].owner; });
  std::vector<Parcel> parcels;
  for (const auto number : by_owner) {
    const auto& [part, owner] = parts[number];
    auto found = std::ranges::find_if(parcels, [&own = part.own](const Parcel& parcel) {
      return parcel.options.dtype() == own.dtype() && parcel.options.device() == own.device();
    });
    if (found == parcels.end()) {
      const auto options = at::TensorOptions(part.own.dtype()).device(part.own.device());
      found = parcels.insert(found, {options, {}, {}, std::vector<std::int64_t>(group_.size())});
    }
    found->numbers.push_back(number);
    found->sizes.push_back(part.share.size);
    found->rows[owner] += found->sizes.back();
  }
  return parcels;
}

std::vector<at::Tensor> ShardRanks::to_owners(std::span<const OwnedShard> parts,
                                              std::span<const at::Tensor> values) const {
  const at::NoGradGuard no_grad;
  const int members = group_.size(), self = group_.rank();
  std::vector<at::Tensor> wholes(parts.size());
  for (const auto& parcel : parcels_of(parts)) {
    auto sent = at::zeros({parcel.numel()}, parcel.options);
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < parcel.numbers.size(); begin += parcel.sizes[i++]) {
      const auto& value = values[parcel.numbers[i]];
      if (value.defined()) sent.narrow(0, begin, value.numel()).copy_(value.detach().reshape({-1}));
    }
    const auto own = parcel.rows[self];
    auto received = at::empty({members * own}, parcel.options);
    const std::vector<std::int64_t> from_each(members, own);
    group_
        .all_to_all(received, sent, {"gathering parameters on their owners", patience_},
                    {.received = from_each, .sent = parcel.rows})
        ->wait();
    begin = 0;
    for (std::size_t i = 0; i < parcel.numbers.size(); ++i) {
      const auto& [part, owner] = parts[parcel.numbers[i]];
      if (owner != self) continue;
      wholes[parcel.numbers[i]] = received.view({members, own})
                                      .narrow(1, begin, parcel.sizes[i])
                                      .reshape({-1})
                                      .narrow(0, 0, part.parameter.numel())
                                      .reshape(part.parameter.sizes());
      begin += parcel.sizes[i];
    }
  }
  return wholes;
}

void ShardRanks::from_owners(std::span<const OwnedShard> parts, std::span<const at::Tensor> wholes) const {
  const at::NoGradGuard no_grad;
  const int members = group_.size(), self = group_.rank();
  for (const auto& parcel : parcels_of(parts)) {
    const auto own = parcel.rows[self];
    auto sent = at::zeros({members * own}, parcel.options);
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < parcel.numbers.size(); ++i) {
      const auto number = parcel.numbers[i];
      if (parts[number].owner != self) continue;
      auto padded = at::zeros({members * parcel.sizes[i]}, parcel.options);
      padded.narrow(0, 0, wholes[number].numel()).copy_(wholes[number].detach().reshape({-1}));
      sent.view({members, own}).narrow(1, begin, parcel.sizes[i]).copy_(padded.view({members, parcel.sizes[i]}));
      begin += parcel.sizes[i];
    }
    auto received = at::empty({parcel.numel()}, parcel.options);
    const std::vector<std::int64_t> to_each(members, own);
    group_
        .all_to_all(received, sent, {"slicing parameters of their owners", patience_},
                    {.received = parcel.rows, .sent = to_each})
        ->wait();
    begin = 0;
    for (std::size_t i = 0; i < parcel.numbers.size(); begin += parcel.sizes[i++]) {
      auto part = parts[parcel.numbers[i]].part.own.detach().view({-1});
      part.copy_(received.narrow(0, begin, part.numel()));
    }
  }
}

}  // namespace lamina::distributed_optimizer
