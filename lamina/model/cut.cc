// SPDX-License-Identifier: Apache-2.0
#include "lamina/model/cut.h"
#include "lamina/base/outer.h"

#include "lamina/model/agreement.h"

namespace lamina::model {
namespace {

using value::List;
using value::Tuple;
using value::Value;

List to_list(const std::vector<int>& numbers) {
  List list;
  for (const int number : numbers) list.items.emplace_back(static_cast<std::int64_t>(number));
  return list;
}

std::vector<int> from_list(const Value& value) {
  std::vector<int> numbers;
  for (const auto& item : value.as<List>().items) numbers.push_back(static_cast<int>(item.as<std::int64_t>()));
  return numbers;
}

}  // namespace

Cut::Cut(const ModuleTree& tree, std::vector<int> owners, const std::vector<int>& anywhere, base::Partition here)
    : owners_(std::move(owners)), anywhere_(owners_.size()), here_(here) {
  for (const int node : anywhere) anywhere_.at(node) = true;
  int position = 0;
  for (const auto& [path, node] : tree.paths()) by_path_.emplace(path, Place{node, position++});
}

const Cut::Place& Cut::place_of(std::string_view name) const {
  while (true) {
    const auto found = by_path_.find(std::string(name));
    if (found != by_path_.end()) return found->second;
    name = base::outer(name);
  }
}

Agreed agree_on_cut(const ModuleTree& tree, const Proposal& proposal, base::Partition here,
                    std::span<const base::Rank> world, messaging::Mailbox& mailbox, const base::Patience& patience) {
  Statement statement{world.size() > 1 ? tree.description() : "", proposal.error, {}};
  const Plan plan = proposal.plan.value_or(Plan());
  statement.word = Tuple{{to_list(plan.owners), to_list(plan.anywhere), plan.table, proposal.word}};
  const auto word = agree(statement, world, mailbox, patience);
  const auto& parts = word.as<Tuple>().items;
  return {Cut(tree, from_list(parts.at(0)), from_list(parts.at(1)), here), parts.at(2).as<std::string>(), parts.at(3)};
}

}  // namespace lamina::model
