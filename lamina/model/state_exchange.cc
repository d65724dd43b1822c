// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/state_exchange.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include <string_view>

#include "lamina/base/hash.h"

namespace lamina::model {
namespace {

using value::Value;

constexpr auto kChannel = "state";

std::int64_t checksum(const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().contiguous().cpu();  // once per run; a value is compared where it is hashed
  const std::string_view bytes(static_cast<const char*>(host.const_data_ptr()), host.nbytes());
  return static_cast<std::int64_t>(base::hash64(bytes));
}

// Name, shape and dtype of each entry, and the checksum of its value, as the first rank has them.
Value describe(std::span<const Entry> entries) {
  value::List rows;
  for (const auto& entry : entries) {
    rows.items.push_back(value::Tuple{
        {entry.name, base::str(entry.tensor.sizes(), " ", entry.tensor.scalar_type()), checksum(entry.tensor)}});
  }
  return rows;
}

// The positions of the owned entries whose value differs from the first rank's; a text instead when the models differ.
Value wanted(std::span<const Entry> entries, const Value& description) {
  const auto& rows = description.as<value::List>().items;
  value::List positions;
  for (std::size_t i = 0; i < std::max(rows.size(), entries.size()); ++i) {
    if (i >= rows.size()) return base::str("\"", entries[i].name, "\", which the first rank does not have");
    const auto& row = rows[i].as<value::Tuple>().items;
    const auto& name = row.at(0).as<std::string>();
    if (i >= entries.size()) return base::str("\"", name, "\", which only the first rank has");
    const auto& entry = entries[i];
    const bool here = entry.tensor.defined();
    const auto form = here ? base::str(entry.tensor.sizes(), " ", entry.tensor.scalar_type()) : "(its value elsewhere)";
    if (entry.name != name || (here && form != row.at(1).as<std::string>())) {
      return base::str("\"", entry.name, "\" ", form, ", where the first rank has \"", name, "\" ",
                       row.at(1).as<std::string>());
    }
    if (entry.owned && checksum(entry.tensor) != row.at(2).as<std::int64_t>()) {
      positions.items.push_back(static_cast<std::int64_t>(i));
    }
  }
  return positions;
}

[[noreturn]] void throw_different(base::Rank rank, const std::string& difference) {
  throw base::ConfigError(base::str("the ranks built different models: rank ", rank, " has ", difference,
                                    "; build the same model on every rank"));
}

void throw_if_any_differs(std::span<const base::Rank> world, const std::vector<Value>& wishes) {
  for (std::size_t i = 0; i < world.size(); ++i) {
    if (const auto* difference = wishes[i].get_if<std::string>()) throw_different(world[i], *difference);
  }
}

std::int64_t take(std::span<Entry> entries, const Value& wish, const Value& values) {
  at::NoGradGuard no_grad;
  std::int64_t received = 0;
  const auto& positions = wish.as<value::List>().items;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const auto& sent = values.as<value::List>().items.at(i).as<at::Tensor>();
    entries[positions[i].as<std::int64_t>()].tensor.copy_(sent);
    received += static_cast<std::int64_t>(sent.nbytes());
  }
  return received;
}

Value values_at(std::span<const Entry> entries, const Value& wish) {
  value::List values;
  for (const auto& position : wish.as<value::List>().items) {
    values.items.emplace_back(entries[position.as<std::int64_t>()].tensor.detach());
  }
  return values;
}

}  // namespace

std::int64_t synchronize(std::span<Entry> entries, std::span<const base::Rank> world, messaging::Mailbox& mailbox,
                         base::Rank self, const base::Patience& patience) {
  const auto first = world.front();
  const bool sends = self == first;
  Value description;
  if (sends) {
    description = describe(entries);
    for (auto rank : world.subspan(1)) mailbox.send(rank, kChannel, description);
  } else {
    description = mailbox.receive(first, kChannel, patience);
  }
  const Value wish = sends ? Value(value::List{}) : wanted(entries, description);
  const auto wishes = mailbox.all_gather(world, wish, patience);
  throw_if_any_differs(world, wishes);
  if (!sends) {
    return wish.as<value::List>().items.empty() ? 0 : take(entries, wish, mailbox.receive(first, kChannel, patience));
  }
  for (std::size_t i = 1; i < world.size(); ++i) {
    if (!wishes[i].as<value::List>().items.empty()) mailbox.send(world[i], kChannel, values_at(entries, wishes[i]));
  }
  return 0;
}

std::vector<at::Tensor> gather(std::span<const Entry> entries, std::span<const base::Rank> members,
                               messaging::Mailbox& mailbox, const base::Patience& patience) {
  value::List own;
  for (const auto& entry : entries) own.items.emplace_back(entry.owned ? entry.tensor.detach() : at::Tensor());
  const auto all = mailbox.all_gather(members, own, patience);
  std::vector<at::Tensor> tensors(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    for (const auto& of_member : all) {
      const auto& tensor = of_member.as<value::List>().items.at(i).as<at::Tensor>();
      if (tensor.defined() && !tensors[i].defined()) tensors[i] = tensor;
    }
    if (!tensors[i].defined()) throw base::UsageError(base::str("no rank holds the value of ", entries[i].name));
  }
  return tensors;
}

}  // namespace lamina::model
