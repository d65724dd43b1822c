// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/plain_values.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "lamina/messaging/agreement.h"
#include "lamina/session/slicing.h"

namespace lamina::session {
namespace {

using topology::Group;
using value::Dict;
using value::Value;

// Marks of values that travel: names are not unique over kinds.
constexpr char kTensor = 't', kHooked = 'h', kAttribute = 'a';

at::Tensor whole(Session& session, const at::Tensor& tensor, const std::optional<layout::Slicing>& slicing) {
  return slicing ? whole_of(session, tensor, *slicing) : tensor;
}

std::vector<model::NamedValue> packed(PlainValues values) {
  std::vector<model::NamedValue> all;
  for (auto& [name, tensor] : values.tensors) all.emplace_back(kTensor + name, std::move(tensor));
  for (const auto& name : values.hooked) all.emplace_back(kHooked + name, true);
  for (auto& [name, value] : values.attributes) all.emplace_back(kAttribute + name, std::move(value));
  return all;
}

PlainValues unpacked(std::vector<model::NamedValue> all) {
  PlainValues values;
  for (auto& [key, value] : all) {
    auto name = key.substr(1);
    switch (key.front()) {
      case kTensor:
        values.tensors.emplace(std::move(name), value.as<at::Tensor>());
        break;
      case kHooked:
        values.hooked.insert(std::move(name));
        break;
      default:
        values.attributes.emplace_back(std::move(name), std::move(value));
    }
  }
  return values;
}

}  // namespace

std::optional<PlainValues> values_of_first(Session& session, std::span<const CheckedTensor> tensors) {
  const bool is_first = session.world().rank == base::Rank(0);
  const bool are_sliced = std::ranges::any_of(tensors, [](const auto& each) { return each.slicing.has_value(); });
  PlainValues values;
  if (session.members(Group::kTp).front() == base::Rank(0)) {  // slices are put together
    for (const auto& [name, tensor, slicing] : tensors) {
      values.tensors.emplace(name, whole(session, tensor.detach(), slicing));
    }
  }
  if (session.topology().size(topology::kReplicas) == 1) {
    return are_sliced && is_first ? std::optional(std::move(values)) : std::nullopt;
  }
  std::optional<Value> own;
  if (is_first) {
    Dict named;
    for (auto& [name, tensor] : values.tensors) named.items.emplace_back(name, std::move(tensor));
    own = std::move(named);
  }
  const auto first =
      messaging::first_given(session.mailbox(), session.members(Group::kWorld), std::move(own), session.patience());
  values.tensors.clear();
  for (const auto& [name, value] : first->value.as<Dict>().items) {
    values.tensors.emplace(name.as<std::string>(), value.as<at::Tensor>());
  }
  return values;
}

std::optional<PlainValues> values_of_owners(Session& session, OwnValues own, bool wanted) {
  if (session.topology().size(Group::kShard) > 1) {  // nobody is still writing to its shards
    session.mailbox().barrier(session.members(Group::kShard), session.patience());
  }
  std::vector<std::size_t> held;
  const auto let_go = c10::make_scope_exit([&] {
    for (const auto number : held) own.sharding->values()->let_go(number);
  });
  const auto number_of = [&](const at::Tensor& tensor) {
    return own.sharding == nullptr ? std::nullopt : own.sharding->find(tensor);
  };
  for (const auto& each : own.tensors) {
    const auto number = number_of(each.tensor);
    if (!number) continue;
    own.sharding->values()->hold(*number);
    held.push_back(*number);
  }
  PlainValues values{{}, std::move(own.hooked), std::move(own.attributes)};
  for (const auto& [name, tensor, slicing] : own.tensors) {
    const auto value = tensor.detach();
    // The whole value of a sharded one is here for a moment.
    const auto made = whole(session, number_of(tensor) ? value.clone() : value, slicing);
    if (wanted) values.tensors.emplace(name, made);
  }
  if (!wanted) return std::nullopt;
  if (session.topology().size(topology::kPartitions) == 1) return values;
  return unpacked(model::gather(packed(std::move(values)), /*to_first=*/true, session.members(topology::kPartitions),
                                session.mailbox(), session.patience()));
}

}  // namespace lamina::session
