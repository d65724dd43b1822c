// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/values.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <unordered_set>

#include "lamina/base/hash.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/rank_device.h"
#include "lamina/device/role.h"
#include "lamina/messaging/agreement.h"
#include "lamina/messaging/spread.h"
#include "lamina/value/moved.h"
#include "lamina/value/released.h"

namespace lamina::model {
namespace {

using value::Dict;
using value::List;
using value::Tuple;
using value::Value;
using ParameterRows = std::span<const Parameter>;

constexpr auto kChannel = "values";
constexpr auto kStateChannel = "state";

std::int64_t checksum(const at::Tensor& tensor) {
  const at::Tensor host =
      devices::on_host(tensor.detach().contiguous());  // once per run; a value is compared where it is hashed
  const std::string_view bytes(static_cast<const char*>(host.const_data_ptr()), host.nbytes());
  return static_cast<std::int64_t>(base::hash64(bytes));
}

// Cut alike on all ranks, each of rows that are whole, or of slices.
std::vector<ParameterRows> portions(ParameterRows rows, std::size_t portion_bytes) {
  std::vector<ParameterRows> result;
  std::size_t begin = 0, size_bytes = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    size_bytes += rows[i].tensor.nbytes();
    const bool is_last =
        i + 1 == rows.size() || rows[i].layout.slicing.has_value() != rows[i + 1].layout.slicing.has_value();
    if (size_bytes < portion_bytes && !is_last) continue;
    result.push_back(rows.subspan(begin, i + 1 - begin));
    begin = i + 1;
    size_bytes = 0;
  }
  return result;
}

Value checksums(ParameterRows rows) {
  List sums;
  for (const auto& row : rows) sums.items.emplace_back(checksum(row.tensor));
  return sums;
}

// The positions of the rows here whose value differs from the first rank's.
List wanted(const ParameterTable& table, ParameterRows rows, const Value& checksums) {
  List positions;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto expected = checksums.as<List>().items.at(i).as<std::int64_t>();
    if (table.is_here(rows[i]) && checksum(rows[i].tensor) != expected) {
      positions.items.emplace_back(static_cast<std::int64_t>(i));
    }
  }
  return positions;
}

// Sorted positions of either list.
List joined(const List& one, const List& other) {
  std::set<std::int64_t> positions;
  for (const auto* list : {&one, &other}) {
    for (const auto& position : list->items) positions.insert(position.as<std::int64_t>());
  }
  List all;
  for (const auto position : positions) all.items.emplace_back(position);
  return all;
}

// Values by the position of their row.
using ByPosition = std::map<std::int64_t, at::Tensor>;

List picked(const ByPosition& values, const List& wish) {
  List all;
  for (const auto& position : wish.items) all.items.emplace_back(values.at(position.as<std::int64_t>()));
  return all;
}

std::int64_t take(ParameterRows rows, const List& wish, const ByPosition& values) {
  const at::NoGradGuard no_grad;
  std::int64_t received = 0;
  for (const auto& position : wish.items) {
    const auto& sent = values.at(position.as<std::int64_t>());
    rows[position.as<std::int64_t>()].tensor.copy_(sent);
    received += static_cast<std::int64_t>(sent.nbytes());
  }
  return received;
}

// Gives each rank the values that it wishes, along the tree of [Note: spreading]: wishes go up, values come down.
std::int64_t spread_values(ParameterRows rows, std::span<const base::Rank> world, const List& own_wish,
                           messaging::Mailbox& mailbox, const base::Patience& patience) {
  const auto [from, to] = messaging::spread(world, mailbox.rank());
  List wish = own_wish;
  std::map<base::Rank, List> wishes;
  for (const auto rank : to) {
    wishes[rank] = mailbox.receive(rank, kChannel, patience).as<List>();
    wish = joined(wish, wishes[rank]);
  }
  ByPosition values;
  if (!from) {
    for (const auto& position : wish.items) {
      values[position.as<std::int64_t>()] = rows[position.as<std::int64_t>()].tensor.detach();
    }
  } else {
    mailbox.send(*from, kChannel, wish);
    if (wish.items.empty()) return 0;
    const auto sent = mailbox.receive(*from, kChannel, patience);
    for (std::size_t i = 0; i < wish.items.size(); ++i) {
      values[wish.items[i].as<std::int64_t>()] = sent.as<List>().items.at(i).as<at::Tensor>();
    }
  }
  for (const auto rank : to) {
    if (!wishes[rank].items.empty()) mailbox.send(rank, kChannel, picked(values, wishes[rank]));
  }
  return take(rows, own_wish, values);
}

// Brings values of a third device, where they cannot travel from, to the host. There is room for all of them.
void take_from_other_devices(ParameterRows rows) {
  for (const auto& row : rows) {
    if (!devices::known_role(row.tensor.device())) value::move_in_place(row.tensor, devices::kHost);
  }
}

// Collective: see give_values. Where every rank has the values already, as from one seed, that is all that is said.
std::int64_t give(const ParameterTable& table, ParameterRows rows, std::span<const base::Rank> world,
                  messaging::Mailbox& mailbox, const base::Patience& patience) {
  take_from_other_devices(rows);
  const bool is_first = mailbox.rank() == world.front();
  const auto sums = messaging::hear_first(mailbox, world, 0, is_first ? checksums(rows) : Value(), patience).word;
  const List own_wish = is_first ? List() : wanted(table, rows, sums);
  const double lacks = own_wish.items.empty() ? 0 : 1;
  if (messaging::largest(mailbox, world, {lacks}, patience).front() == 0) return 0;
  return spread_values(rows, world, own_wish, mailbox, patience);
}

using Memory = std::unordered_set<const c10::StorageImpl*>;

const c10::StorageImpl* memory_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

void release(const ParameterTable& table, ParameterRows rows, const Memory& kept,
             const std::function<std::string(const Parameter&)>& why) {
  for (const auto& row : rows) {
    if (table.is_here(row)) continue;
    at::Tensor tensor = row.tensor;
    const bool shared = !value::is_released(tensor) && kept.contains(memory_of(tensor));
    value::release(tensor, why(row), {}, shared ? value::Memory::kKept : value::Memory::kFreed);
  }
}

// A rank's own parts as the dictionaries that travel.
std::vector<Dict> state_portions(std::vector<NamedValue> own, std::size_t portion_bytes) {
  std::vector<Dict> portions;
  std::size_t size_bytes = portion_bytes;
  for (auto& [name, part] : own) {
    if (size_bytes >= portion_bytes) {
      portions.emplace_back();
      size_bytes = 0;
    }
    value::for_each_tensor(part, [&](const at::Tensor& tensor) {
      if (tensor.defined()) size_bytes += tensor.nbytes();
    });
    portions.back().items.emplace_back(std::move(name), std::move(part));
  }
  return portions;
}

// The next portion that `rank` has sent for this gathering.
Value receive_of(std::int64_t gathering, base::Rank rank, messaging::Mailbox& mailbox, const base::Patience& patience) {
  while (true) {
    const auto sent = mailbox.receive(rank, kStateChannel, patience);
    const auto& parts = sent.as<Tuple>().items;
    if (parts.at(0).as<std::int64_t>() == gathering) return parts.at(1);
  }
}

// Memory that is not to be freed: what lies here, and what of `later` is still to be read.
Memory kept_for(const ParameterTable& table, ParameterRows later) {
  Memory kept;
  const auto keep = [&](const Parameter& row) {
    if (!value::is_released(row.tensor)) kept.insert(memory_of(row.tensor));
  };
  for (const auto* row : table.here()) keep(*row);
  for (const auto& row : later) keep(row);
  return kept;
}

}  // namespace

std::int64_t give_values(const ParameterTable& table, const Alike& alike, messaging::Mailbox& mailbox,
                         const base::Patience& patience, const ValueHooks& hooks, std::size_t portion_bytes) {
  std::int64_t received = 0;
  for (const ParameterRows rows : portions(table.all(), portion_bytes)) {
    if (hooks.make) hooks.make(rows);
    const auto& ranks = rows.front().layout.slicing ? alike.same_slice : alike.world;
    if (ranks.size() > 1) received += give(table, rows, ranks, mailbox, patience);
    for (const auto& row : rows) {
      if (table.is_here(row)) value::move_in_place(row.tensor, devices::rank_device());
    }
    if (hooks.given) hooks.given(rows);
    const ParameterRows later(rows.data() + rows.size(), table.all().data() + table.all().size());
    release(table, rows, kept_for(table, later), hooks.why);
  }
  return received;
}

void release_others(const ParameterTable& table, const std::function<std::string(const Parameter&)>& why) {
  release(table, table.all(), kept_for(table, {}), why);
}

std::vector<NamedValue> gather(std::vector<NamedValue> own, bool to_first, std::span<const base::Rank> pipeline,
                               messaging::Mailbox& mailbox, const base::Patience& patience, std::size_t portion_bytes) {
  const auto mine = state_portions(std::move(own), portion_bytes);
  std::int64_t most = 0;
  std::optional<std::int64_t> now;  // names this gathering: what came for one that was interrupted is dropped
  const Tuple said{{static_cast<std::int64_t>(mine.size()), base::Clock::now().time_since_epoch().count()}};
  for (const auto& heard : mailbox.all_gather(pipeline, said, patience)) {
    const auto& words = heard.as<Tuple>().items;
    most = std::max(most, words.at(0).as<std::int64_t>());
    if (!now) now = words.at(1).as<std::int64_t>();
  }
  std::vector<std::vector<NamedValue>> of_ranks(pipeline.size());
  const auto take = [&](std::size_t rank, const Value& portion) {
    for (const auto& [name, part] : portion.as<Dict>().items) of_ranks[rank].emplace_back(name.as<std::string>(), part);
  };
  for (std::size_t i = 0; i < static_cast<std::size_t>(most); ++i) {
    const Value portion = i < mine.size() ? mine[i] : Dict();
    if (!to_first) {
      const auto portions = mailbox.all_gather(pipeline, portion, patience);
      for (std::size_t rank = 0; rank < portions.size(); ++rank) take(rank, portions[rank]);
    } else if (mailbox.rank() != pipeline.front()) {
      mailbox.send(pipeline.front(), kStateChannel, Tuple{{*now, portion}});
    } else {
      take(0, portion);
      for (std::size_t rank = 1; rank < pipeline.size(); ++rank) {
        take(rank, receive_of(*now, pipeline[rank], mailbox, patience));
      }
    }
  }
  std::vector<NamedValue> all;
  for (auto& parts : of_ranks) std::ranges::move(parts, std::back_inserter(all));
  return all;
}

std::vector<at::Tensor> gather(const ParameterTable& table, std::span<const base::Rank> pipeline,
                               messaging::Mailbox& mailbox, const base::Patience& patience) {
  std::vector<NamedValue> own;
  for (const auto* row : table.here()) own.emplace_back(row->layout.name, row->tensor.detach());
  std::vector<at::Tensor> values(table.all().size());
  for (const auto& [name, value] : gather(std::move(own), /*to_first=*/false, pipeline, mailbox, patience)) {
    values[table.find(name) - table.all().data()] = value.as<at::Tensor>();
  }
  return values;
}

}  // namespace lamina::model
