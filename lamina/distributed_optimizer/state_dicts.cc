// SPDX-License-Identifier: Apache-2.0
#include "lamina/distributed_optimizer/state_dicts.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/faces/sayings.h"

namespace lamina::distributed_optimizer {
namespace {

using value::List;
using value::Tuple;
using value::Value;

// Lists of lists, as ranks send each other, and back.
template <class Item, class Made>
Value sent(const std::vector<std::vector<Item>>& groups, const Made& made) {
  List all;
  for (const auto& group : groups) {
    List items;
    for (const auto& item : group) items.items.push_back(made(item));
    all.items.emplace_back(std::move(items));
  }
  return all;
}

template <class Item, class Made>
std::vector<std::vector<Item>> received(const Value& sent, const Made& made) {
  std::vector<std::vector<Item>> groups;
  for (const auto& group : sent.as<List>().items) {
    auto& items = groups.emplace_back();
    for (const auto& item : group.as<List>().items) items.push_back(made(item));
  }
  return groups;
}

std::string told(const StateDict::Parts& parts) {
  return base::str("part ", parts.part, " of ", parts.count, " over ", parts.over);
}

base::UsageError other_optimizer(const std::string& what) {
  return base::UsageError(what, base::Code{"state-other-optimizer"});
}

}  // namespace

// Tells the other ranks of the state dict that a rank loads.
struct StateDicts::Word {
  bool is_partial = false;
  std::string problem;
  bool has_own = false;  // a partial one has the parameters of this rank, and no others
  Names names;           // in a partial one

  Value sent() const {
    const auto text = [](const std::string& name) { return Value(name); };
    return Tuple{{is_partial, problem, has_own, distributed_optimizer::sent(names, text)}};
  }
  static Word from(const Value& sent) {
    const auto& items = sent.as<Tuple>().items;
    const auto text = [](const Value& name) { return name.as<std::string>(); };
    return {items.at(0).as<bool>(), items.at(1).as<std::string>(), items.at(2).as<bool>(),
            received<std::string>(items.at(3), text)};
  }
};

bool StateDicts::is_plain(const UserOptimizer& user) const {
  if (!groups_.are_whole(user)) return false;
  return !parameters_.are_cut() || (ranks_.one_copy().size() == 1 && parameters_.sharding() == nullptr);
}

bool StateDicts::waits(const StateDict& dict) const {
  return !parameters_.are_cut() && (ranks_.pipeline().size() > 1 || dict.is_partial || parameters_.replaces());
}

std::optional<StateDict> StateDicts::whole(const UserOptimizer& user, bool to_first) const {
  if (is_plain(user)) return row_by_row(states_.state(user, Extent::kPart), known(user));
  const auto layout = this->layout(user);
  const auto state = states_.state(user, to_first ? Extent::kFirst : Extent::kWhole);
  if (to_first && ranks_.one_copy().front() != ranks_.own) return std::nullopt;
  return row_by_row(state, layout);
}

StateDict StateDicts::own(const UserOptimizer& user, bool joins_shards) const {
  const auto state = states_.state(user, joins_shards ? Extent::kSlice : Extent::kPart);
  auto here = known(user);
  for (auto& group : here) std::erase_if(group, [](const Known& member) { return !member.here; });
  auto dict = row_by_row(state, here);
  dict.is_partial = true;
  dict.saved_by = topology::saved_place(ranks_.topology, ranks_.own, /*of_shards=*/false);
  if (!joins_shards) dict.parts = parts();
  return dict;
}

std::optional<StateDict::Parts> StateDicts::parts() const {
  const auto over = parameters_.divided_over();
  if (!over) return std::nullopt;
  const auto* word = *over == topology::Group::kShard ? "shard" : "rdp";
  return StateDict::Parts{word, ranks_.topology.index(*over, ranks_.own), ranks_.topology.size(*over)};
}

StateDict StateDicts::row_by_row(const NamedState& state, const Layout& layout) const {
  StateDict dict;
  for (const auto& group : layout) {
    auto& rows = dict.groups.emplace_back();
    for (const auto& [name, given, here] : group) {
      const auto found = state.states.find(name);
      const auto master = state.masters.find(name);
      rows.push_back({name, given, found == state.states.end() ? Value() : found->second,
                      master == state.masters.end() ? at::Tensor() : master->second});
    }
  }
  if (scale_.is_on()) dict.scale = scale_.state();
  return dict;
}

NamedState StateDicts::named(const StateDict& dict, const Layout& layout) const {
  NamedState state;
  for (std::size_t i = 0; i < dict.groups.size(); ++i) {
    for (std::size_t k = 0; k < dict.groups[i].size(); ++k) {
      const auto& row = dict.groups[i][k];
      const auto& name = dict.is_partial ? row.name : layout.at(i).at(k).name;
      if (row.state.get_if<value::None>() == nullptr) state.states[name] = row.state;
      if (row.master.defined()) state.masters[name] = row.master;
    }
  }
  return state;
}

// Groups.

StateDicts::Layout StateDicts::known(const UserOptimizer& user) const {
  Layout known;
  for (const auto& group : groups_.members(user)) {
    auto& members = known.emplace_back();
    for (const auto& [name, given, parameter, local] : group) members.push_back({name, given, local.defined()});
  }
  return known;
}

// The groups of the whole optimizer.
StateDicts::Layout StateDicts::layout(const UserOptimizer& user) const {
  const auto to_value = [](const Known& member) -> Value { return Tuple{{member.name, member.given, member.here}}; };
  const auto from_value = [](const Value& sent) {
    const auto& items = sent.as<Tuple>().items;
    return Known{items.at(0).as<std::string>(), items.at(1).as<std::string>(), items.at(2).as<bool>()};
  };
  std::vector<Layout> everyone;
  for (const auto& one : ranks_.mailbox.all_gather(ranks_.one_copy(), sent(known(user), to_value), ranks_.patience())) {
    everyone.push_back(received<Known>(one, from_value));
  }
  return agreed(user, everyone);
}

// Groups that each rank made of its own parameters have the order of the model. A parameter that no rank has any more
// was taken out of the groups.
StateDicts::Layout StateDicts::agreed(const UserOptimizer& user, const std::vector<Layout>& everyone) const {
  const auto count = everyone.front().size();
  std::set<std::pair<std::size_t, std::string>> held;
  for (const auto& layout : everyone) {
    if (layout.size() != count) throw faces::refusal("groups-apart", count, layout.size());
    for (std::size_t i = 0; i < count; ++i) {
      for (const auto& member : layout[i]) {
        if (member.here) held.emplace(i, member.name);
      }
    }
  }
  auto layouts = everyone;
  for (auto& layout : layouts) {
    for (std::size_t i = 0; i < count; ++i) {
      std::erase_if(layout[i], [&](const Known& member) { return !held.contains({i, member.name}); });
    }
  }
  const auto is_same = [](const Known& one, const Known& other) {
    return one.name == other.name && one.given == other.given;
  };
  const auto is_first = [&](const Layout& layout) {
    return std::ranges::equal(layout, layouts.front(), [&](const auto& one, const auto& other) {
      return std::ranges::equal(one, other, is_same);
    });
  };
  if (std::ranges::all_of(layouts, is_first)) return layouts.front();
  std::map<std::string, std::size_t> order;
  if (parameters_.are_cut()) {
    for (const auto& row : parameters_.table()->all()) order.emplace(row.layout.name, order.size());
  } else {
    for (const auto& [tensor, name] : user.named_parameters()) order.emplace(name, order.size());
  }
  const auto place = [&](const Known& member) {
    const auto found = order.find(member.name);
    return found == order.end() ? order.size() : found->second;
  };
  Layout merged(count);
  for (std::size_t i = 0; i < count; ++i) {
    std::map<std::string, std::size_t> known;
    for (const auto& layout : layouts) {
      for (const auto& member : layout[i]) {
        const auto [found, is_new] = known.emplace(member.name, merged[i].size());
        is_new ? merged[i].push_back(member) : void(merged[i][found->second].given = member.given);
      }
    }
    std::ranges::stable_sort(merged[i], {}, place);
  }
  return merged;
}

// Loading.

NamedState StateDicts::found_in(const UserOptimizer& user, const StateDict& dict) const {
  const auto layout = this->layout(user);
  Word own{dict.is_partial, misfit(user, dict, layout), true, {}};
  const auto known = this->known(user);
  for (std::size_t i = 0; dict.is_partial && i < dict.groups.size(); ++i) {
    std::set<std::string> here, given;
    auto& names = own.names.emplace_back();
    for (const auto& row : dict.groups[i]) names.push_back(row.name);
    given.insert(names.begin(), names.end());
    for (const auto& member : i < known.size() ? known[i] : Layout::value_type()) {
      if (member.here) here.insert(member.name);
    }
    own.has_own = own.has_own && here == given;
  }
  std::vector<Word> everyone;
  for (const auto& one : ranks_.mailbox.all_gather(ranks_.one_copy(), own.sent(), ranks_.patience())) {
    everyone.push_back(Word::from(one));
  }
  for (const auto& word : everyone) {
    if (!word.problem.empty()) throw faces::refusal("other-state", word.problem);
  }
  const auto part = std::ranges::find(everyone, true, &Word::is_partial);
  const auto full = std::ranges::find(everyone, false, &Word::is_partial);
  if (part != everyone.end() && full != everyone.end()) {
    throw faces::refusal("mixed-states", part - everyone.begin(), "state dict of the optimizer",
                         full - everyone.begin());
  }
  auto state = named(dict, layout);
  if (!dict.is_partial || std::ranges::all_of(everyone, &Word::has_own)) return state;
  require_all(everyone, layout);
  return states_.gathered(user, std::move(state));
}

void StateDicts::require_fits(const UserOptimizer& user, const StateDict& dict) const {
  const auto problem = misfit(user, dict, agreed(user, {known(user)}));
  if (!problem.empty()) throw faces::refusal("other-state", problem);
}

void StateDicts::require_scale(const StateDict& dict) const {
  if (const auto problem = misfit_of_scale(dict); !problem.empty()) throw faces::refusal("other-state", problem);
}

// Says what keeps a state dict from being loaded, "" if nothing.
std::string StateDicts::misfit(const UserOptimizer& user, const StateDict& dict, const Layout& layout) const {
  auto problem = misfit_of_parts(dict);
  if (problem.empty() && dict.is_partial) problem = why_elsewhere(dict.saved_by, ranks_.topology, ranks_.own);
  if (problem.empty()) problem = misfit_of_groups(dict, layout);
  if (problem.empty()) problem = misfit_of_scale(dict);
  if (!problem.empty()) return problem;
  return states_.misfit(user, named(dict, layout).masters, /*are_parts=*/dict.parts.has_value());
}

std::string StateDicts::misfit_of_parts(const StateDict& dict) const {
  const auto own = parts();
  if (!dict.parts || dict.parts == own) return "";
  const auto here = own ? base::str("which has ", told(*own)) : "which has whole ones";
  return base::str("the states are ", told(*dict.parts), " of each parameter's, and not this rank's, ", here,
                   ": save those of whole parameters (gather_if_shard), or all of it");
}

std::string StateDicts::misfit_of_groups(const StateDict& dict, const Layout& layout) const {
  if (dict.groups.size() != layout.size()) {
    return faces::said("other-groups", dict.groups.size(), layout.size());
  }
  for (std::size_t i = 0; !dict.is_partial && i < layout.size(); ++i) {
    if (dict.groups[i].size() != layout[i].size()) {
      return faces::said("other-members", i, dict.groups[i].size(), layout[i].size());
    }
  }
  return "";
}

// A dynamic loss scale goes on with the saved one; a static one is the script's.
std::string StateDicts::misfit_of_scale(const StateDict& dict) const {
  if (!scale_.is_dynamic()) return "";
  if (!dict.no_scale.empty() || !dict.scale) return dict.no_scale;
  try {
    optim::LossScale(scale_).set_state(*dict.scale);
  } catch (const base::UsageError& error) {
    return base::str("its loss_scale is ", dict.scale->scale, ", which is none (", error.what(), ")");
  }
  return "";
}

// Checks that the partial states of all ranks together have the parameters of the optimizer.
void StateDicts::require_all(const std::vector<Word>& everyone, const Layout& layout) const {
  for (std::size_t i = 0; i < layout.size(); ++i) {
    std::set<std::string> found;
    for (const auto& word : everyone) found.insert(word.names.at(i).begin(), word.names.at(i).end());
    for (const auto& member : layout[i]) {
      if (found.erase(member.name) > 0) continue;
      throw other_optimizer(base::str("the partial state dicts lack ", member.name, ", which is in group ", i,
                                      " and lives on ", home_of(member.name)));
    }
    if (!found.empty()) {
      throw other_optimizer(base::str("the partial state dicts have ", *found.begin(), " in group ", i,
                                      ", where the optimizer has it not"));
    }
  }
}

std::string StateDicts::home_of(const std::string& name) const {
  const auto* row = parameters_.table()->find(name);
  const auto partition = row == nullptr ? 0 : row->layout.partition.value;
  const auto rank = ranks_.topology.translate(topology::kPartitions, static_cast<int>(partition), ranks_.own);
  return base::str("partition ", partition, " on rank ", rank);
}

}  // namespace lamina::distributed_optimizer
