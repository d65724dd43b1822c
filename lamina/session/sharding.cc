// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/sharding.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>
#include <utility>

#include "lamina/base/edit_distance.h"
#include "lamina/base/error.h"
#include "lamina/base/log.h"
#include "lamina/base/module_names.h"
#include "lamina/base/rank_list.h"
#include "lamina/base/str.h"
#include "lamina/device/capabilities.h"
#include "lamina/device/memory.h"
#include "lamina/device/rank_device.h"
#include "lamina/environment/memory.h"
#include "lamina/messaging/agreement.h"
#include "lamina/model/float_types.h"
#include "lamina/model/room.h"
#include "lamina/plan/format.h"
#include "lamina/sharding/memory.h"

namespace lamina::session {

using topology::Group;

namespace {

void tell_of_placement(const Session& session) {
  if (session.world().rank != base::Rank(0)) return;
  const auto better = topology::placements_on_one_machine(session.topology(), session.world().size, Group::kShard);
  if (better.empty()) return;
  base::log_warning(
      base::str("sharding groups are spread over machines, whose network then carries all parameters: "
                "with placement_strategy \"",
                better.front(), "\" each is on one"));
}

// The sharding group: over shared memory where it has some, else by levels where it spans machines.
collective::Group& sharding_group(Session& session) {
  auto& groups = session.groups();
  auto& flat = groups.get(Group::kShard, session.patience());
  const bool spans = std::cmp_less(session.members(Group::kShardWithin).size(), flat.size());
  if (flat.shares_memory() || !spans || !session.config().sdp_hierarchical_allgather) return flat;
  const auto why_flat = topology::why_no_levels(session.topology(), session.world().rank);
  if (flat.rank() == 0) {
    base::log_warning(base::str("sharding over ", base::name_ranks(session.members(Group::kShard)),
                                why_flat.empty() ? ", on several machines, gathers across them first, then within"
                                                 : " does not gather by machines: ",
                                why_flat));
  }
  if (!why_flat.empty()) return flat;
  return groups.by_levels(Group::kShard, Group::kShardWithin, Group::kShardAcross, session.patience());
}

// The bytes that this rank may still take where it computes.
std::optional<std::int64_t> memory_of_rank(const Session& session) {
  if (!devices::is_host(devices::rank_device())) return devices::free_memory();
  const auto available = environment::available_memory();
  return available ? std::optional(*available / session.world().local_size) : std::nullopt;
}

// Collective over the world: throws base::ConfigError where parameters and gradients alone do not fit into the memory
// that the ranks have, before anything is sharded.
void require_memory(Session& session, const model::ParameterTable& table) {
  constexpr auto kUnknown = std::numeric_limits<std::int64_t>::max() / 2;
  const auto own = sharding::need_of(table, memory_of_rank(session).value_or(kUnknown));
  const int degree = session.config().sharded_data_parallel_degree;
  const auto everyone = session.members(Group::kWorld);
  const double is_misfit = own.fits(degree) ? 0 : 1;
  if (messaging::largest(session.mailbox(), everyone, {is_misfit}, session.patience()).front() == 0) return;
  value::List word{{own.whole, own.sharded, own.trained, own.there, own.available}};
  std::vector<sharding::MemoryNeed> needs;
  for (const auto& heard : session.mailbox().all_gather(everyone, word, session.patience())) {
    const auto& items = heard.as<value::List>().items;
    const auto number = [&items](std::size_t i) { return items.at(i).as<std::int64_t>(); };
    needs.push_back({number(0), number(1), number(2), number(3), number(4)});
  }
  const auto misfit = std::ranges::find_if(needs, [&](const auto& need) { return !need.fits(degree); });
  const int replicas = session.topology().size(topology::kSameParts);
  const auto fitting = sharding::smallest_degree(needs, replicas);
  throw base::ConfigError(
      base::str("sharded_data_parallel_degree ", degree, ": parameters and gradients take ",
                plan::format_bytes(misfit->bytes(degree)), " of rank ", misfit - needs.begin(), ", which has ",
                plan::format_bytes(misfit->there + misfit->available), " here; ",
                fitting ? base::str("the smallest degree that fits is ", *fitting)
                        : base::str("with degree ", replicas, ", of all replicas, it would be ",
                                    plan::format_bytes(misfit->bytes(replicas)),
                                    ": more ranks or partitions (pipeline_parallel_degree) are needed")),
      base::Code{"shard-memory"});
}

sharding::Keeping::Expect expected(config::BackwardPrefetch prefetch) {
  using Expect = sharding::Keeping::Expect;
  switch (prefetch) {
    case config::BackwardPrefetch::kPre:
      return Expect::kBeforeBackward;
    case config::BackwardPrefetch::kPost:
      return Expect::kAfterBackward;
    case config::BackwardPrefetch::kNone:
      break;
  }
  return Expect::kNever;
}

sharding::Keeping keeping(const config::Config& config) {
  using Until = sharding::Keeping::Until;
  const auto until = config.sdp_reshard_after_forward    ? Until::kForward
                     : config.sdp_reshard_after_backward ? Until::kBackward
                                                         : Until::kUpdate;
  return {config.sdp_max_live_parameters, until, expected(config.sdp_backward_prefetch)};
}

std::shared_ptr<sharding::Sharding> make_sharding(Session& session, const model::ParameterTable& table,
                                                  std::span<const std::string> units) {
  tell_of_placement(session);
  require_memory(session, table);
  auto& group = sharding_group(session);
  const bool copied = session.topology().size(Group::kShardCopies) > 1;
  auto* copies = copied ? &session.groups().get(Group::kShardCopies, session.patience()) : nullptr;
  auto ranks = session.ranks();
  ranks.patience = [&session] { return session.patience_in_steps(); };
  const bool in_order = session.topology().size(topology::kPartitions) == 1 ||
                        std::ranges::includes(session.job().team(), session.members(Group::kShard));
  auto sharding = std::make_shared<sharding::Sharding>(
      sharding::sharded(table), units,
      sharding::Sharding::Options{session.config().sdp_reduce_bucket_size, keeping(session.config())},
      sharding::ShardingContext{group, copies, std::move(ranks), in_order, Session::turn_of_this_thread(),
                                model::scalar_type(session.config().reduce_dtype)});
  session.job().call_hooks().add(sharding->values(), sharding->values()->units());
  session.when_closed([weak = std::weak_ptr(sharding)] {
    if (const auto closing = weak.lock()) closing->close();
  });
  return sharding;
}

}  // namespace

void order_turns(Session& session) {
  const auto& topology = session.topology();
  if (topology.size(topology::kPartitions) == 1 || topology.size(Group::kShard) == 1) return;
  std::vector<base::Rank> team;
  for (const auto rank : session.members(Group::kShard)) {
    std::ranges::copy(topology.members(Group::kTp, rank), std::back_inserter(team));
  }
  std::ranges::sort(team);
  const bool gathers = !session.groups().get(Group::kShard, session.patience()).shares_memory() ||
                       !devices::is_host(devices::rank_device());
  if (messaging::largest(session.mailbox(), team, {gathers ? 1.0 : 0.0}, session.patience()).front() == 0) return;
  session.job().join_team(std::move(team), /*own_batches=*/true);
}

std::vector<std::string> units_of(const config::Config& config, const model::ModuleTree& tree, const model::Cut& cut) {
  const auto& nodes = tree.nodes();
  const auto is_here = [&](int node) { return node >= 0 && cut.owners()[node] == cut.here().value; };
  const auto caller_of = [&](int node) {  // itself, or the nearest one above that is called
    while (node > 0 && !nodes[node].callable) node = nodes[node].parent;
    return node;
  };
  std::set<std::string> units;
  if (!config.sdp_units) {
    for (const auto& node : nodes) units.insert(node.name);
    return {units.begin(), units.end()};
  }
  const auto paths = tree.paths();
  for (const auto& name : *config.sdp_units) {
    const auto path = std::ranges::find(paths, name, &std::pair<std::string, int>::first);
    if (path == paths.end()) {
      const auto& nearest = base::nearest(paths, name, &std::pair<std::string, int>::first).first;
      throw base::ConfigError(
          base::str("sdp_units: the model has no module \"", name, "\"; the nearest is \"", nearest, "\""));
    }
    if (const int node = caller_of(path->second); is_here(node)) units.insert(nodes[node].name);
  }
  for (int node = 0; node < tree.size(); ++node) {
    if (!nodes[node].callable || !is_here(node)) continue;
    if (node == 0 || !is_here(caller_of(nodes[node].parent))) units.insert(nodes[node].name);
  }
  return {units.begin(), units.end()};
}

void require_persistent(const config::Config& config, const model::ModuleTree& tree) {
  const auto& parameters = tree.parameters();
  for (const auto& entry : config.sdp_persistent_parameters.value_or(std::vector<std::string>())) {
    const auto is_of_it = [&](const model::ModuleTensor& held) { return base::is_in_module(held.name, entry); };
    if (std::ranges::any_of(parameters, is_of_it)) continue;
    const auto nearest = parameters.empty() ? "" : base::nearest(parameters, entry, &model::ModuleTensor::name).name;
    throw base::ConfigError(base::str("sdp_persistent_parameters: the model has no parameter \"", entry,
                                      "\", and none in a module of that name; the nearest is \"", nearest,
                                      "\". A parameter in several modules has the first of its names"));
  }
}

std::shared_ptr<sharding::Sharding> give_values(Session& session, const model::ParameterTable& table,
                                                std::span<const std::string> units, model::ValueHooks hooks,
                                                std::size_t portion_bytes, bool values_follow) {
  std::shared_ptr<sharding::Sharding> sharding;
  if (session.config().sharded_data_parallel_degree > 1) {
    sharding = make_sharding(session, table, units);
    hooks.given = [&](std::span<const model::Parameter> rows) { sharding->take(rows); };
    portion_bytes = 1;  // one parameter whole at a time
  }
  model::Alike alike;
  if (values_follow) {
    hooks.make = [&table](std::span<const model::Parameter> rows) { model::make_room(table, rows); };
  } else {
    alike.world = session.members(Group::kWorld);
  }
  const auto slice = [&](base::Rank rank) { return session.topology().coordinates(rank).tp; };
  std::ranges::copy_if(alike.world, std::back_inserter(alike.same_slice),
                       [&](base::Rank rank) { return slice(rank) == slice(session.world().rank); });
  model::give_values(table, alike, session.mailbox(), session.patience(), hooks, portion_bytes);
  if (sharding) sharding->begin();
  return sharding;
}

}  // namespace lamina::session
