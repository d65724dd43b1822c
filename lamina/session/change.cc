// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/change.h"

#include <algorithm>
#include <array>
#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/str.h"
#include "lamina/device/failure.h"
#include "lamina/messaging/agreement.h"
#include "lamina/messaging/relay.h"
#include "lamina/messaging/same_arguments.h"
#include "lamina/model/room.h"
#include "lamina/rendezvous/job_store.h"
#include "lamina/session/epoch_talk.h"
#include "lamina/verification/run_recorder.h"

namespace lamina::session {
namespace {

using nlohmann::json;

// Keys that say who does what: other ones stay as they are as long as the job lives.
constexpr std::array kKeys{"partitions",
                           "pipeline_parallel_degree",
                           "microbatches",
                           "schedule",
                           "pipeline",
                           "active_microbatches",
                           "placement_strategy",
                           "auto_partition",
                           "default_partition",
                           "optimize",
                           "memory_weight",
                           "sharded_data_parallel_degree",
                           "sdp_param_persistence_threshold",
                           "sdp_persistent_parameters",
                           "sdp_units",
                           "shard_optimizer_state",
                           "tensor_parallel_degree"};

std::string_view canonical(std::string_view key) {
  if (key == "pipeline_parallel_degree") return "partitions";
  return key == "pipeline" ? "schedule" : key;
}

std::string listed() {
  std::string text;
  for (const auto* key : kKeys) text += base::str(text.empty() ? "" : ", ", key);
  return text;
}

json given_keys(const std::string& text) {
  auto given = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!given.is_object()) throw refused_change(base::str("\"", text, "\" is no JSON object of keys"));
  json keys = json::object();
  for (const auto& [key, value] : given.items()) {
    if (!is_layout_key(key)) {
      throw refused_change(base::str("\"", key, "\" is no key of a layout that may change; these are ", listed()));
    }
    if (!keys.emplace(canonical(key), value).second)
      throw refused_change(base::str(key, " is given twice, by both its names"));
  }
  return keys;
}

// The keys, once all ranks have given the same.
json given_alike(Session& session, const std::string& text) {
  const auto world = session.members(topology::Group::kWorld);
  json given;
  messaging::act_together(session.mailbox(), world, [&] { given = given_keys(text); }, session.patience());
  std::vector<messaging::Argument> arguments;
  for (const auto* key : kKeys) {
    if (canonical(key) == key) arguments.push_back({key, given.contains(key) ? given[key].dump() : "not given"});
  }
  const auto differences =
      messaging::differing_arguments(session.mailbox(), world, "lamina.change()", arguments, session.patience());
  if (!differences.empty()) throw refused_change(differences);
  return given;
}

// Throws where an optimizer cannot have its part in that layout.
void require_fits(const ChangingOptimizer& optimizer, const config::Config& config, int copies) {
  const auto& name = optimizer.name;
  if (!optimizer.beside.empty()) {
    throw refused_change(
        base::str(name, " has a parameter that is not the model's, at ", optimizer.beside, " of its groups"));
  }
  const bool slices = config.tensor_parallel_degree > 1;
  if (optimizer.measures_all && (config.partitions > 1 || slices)) {
    throw refused_change(
        base::str(name, " measures all parameters at once, which no rank has of several partitions, or of slices"));
  }
  const bool divides =
      slices || config.sharded_data_parallel_degree > 1 || (config.shard_optimizer_state && copies > 1);
  if (divides && !optimizer.why_not_parts.empty()) {
    throw refused_change(base::str(name, " would have a part of each parameter, and ", optimizer.why_not_parts));
  }
  if (optimizer.takes_sparse && copies > 1) {
    throw refused_change(base::str(name, " takes sparse gradients alone, which averaged over copies are dense"));
  }
  if (optimizer.waits) {
    throw refused_change(
        base::str("a state of ", name, " waits to be loaded when the model is cut: make a step first"));
  }
}

// The store where groups of that world meet, on the rank that hosts it; nullptr on another one. It is that of groups of
// the session before, too, and is not to go with these while others meet there already.
std::shared_ptr<rendezvous::JobStore> hosted_store(const environment::World& world, const base::Patience& patience,
                                                   const std::function<void()>& check_interrupt) {
  if (!world.launched || world.size == 1 || !rendezvous::hosts_store(world.rank)) return nullptr;
  return std::make_shared<rendezvous::JobStore>(
      rendezvous::JobStore::Options{.host = world.master_addr,
                                    .port = world.master_port,
                                    .is_host = true,
                                    .deadline = base::Deadline::after(patience.timeout),
                                    .check_interrupt = check_interrupt});
}

}  // namespace

base::UsageError refused_change(const std::string& why) {
  return base::UsageError("lamina.change(): " + why, base::Code{"change-refused"});
}

void require_may_change(Session& session) {
  if (session.recorder().keeps_events()) {
    throw refused_change(
        "a timeline is being recorded, of one layout: end it first, or start the job without --timeline");
  }
  if (session.run_recorder() && !session.run_recorder()->is_over()) {
    throw refused_change(
        "steps are being compared with the plain model's (verify_steps, lamina verify), in one layout");
  }
}

config::Config changed_config(Session& session, const std::string& text) {
  const auto given = given_alike(session, text);
  require_may_change(session);
  if (!session.half_cut().empty()) throw refused_change("the model was not cut to the end: " + session.half_cut());
  return config_of(session, given.dump(), session.world().size);
}

bool clips_as_shards(const Session& session) {
  return session.clips_as_shards() || session.config().sharded_data_parallel_degree > 1;
}

bool is_layout_key(std::string_view key) { return std::ranges::find(kKeys, key) != kKeys.end(); }

void share_out(Session& session, int copies, config::Config& config) {
  config.all_microbatches = session.job().all_microbatches();
  config.microbatches = static_cast<int>((config.all_microbatches + copies - 1) / copies);
}

config::Config config_of(Session& session, const std::string& text, int ranks) {
  const auto& before = session.config();
  const auto given = given_keys(text);
  auto keys = json::parse(config::to_json(before));
  // Defaults that depend on what may change, where nobody has said them.
  if (before.active_microbatches == config::default_window(before.partitions)) keys["active_microbatches"] = nullptr;
  if (given.contains("optimize")) keys["memory_weight"] = nullptr;
  keys["microbatches"] = 1;  // where nobody gives them they follow from the number of copies
  keys["verify_steps"] = 0;  // those were the first ones of the job
  if (!clips_as_shards(session)) keys["sdp_gradient_clipping"] = nullptr;
  keys.update(given);
  auto config = config::with_defaults(config::parse_config({.json = keys.dump()}).config);
  const topology::Topology topology(
      ranks, config.partitions, config.tensor_parallel_degree, config.placement_strategy,
      {.shard = config.sharded_data_parallel_degree, .one_batch = config.prescaled_batch});
  const int copies = topology.size(topology::kReplicas);
  const int copies_before = session.topology().size(topology::kReplicas);
  if (!config.ddp && std::max(copies, copies_before) > 1) {
    throw refused_change(base::str("without ddp the ", std::max(copies, copies_before),
                                   " copies of the model train apart, and are not one: start the job with ddp=True"));
  }
  if (!given.contains("microbatches")) {
    share_out(session, copies, config);
  }
  config::validate(config);
  config::require_available(config, copies);
  return config;
}

void require_fits(const ChangingJob& job, const config::Config& config, int copies) {
  if (!job.has_model) throw refused_change("there is no DistributedModel yet: give the layout to init()");
  if (job.saves) throw refused_change("a checkpoint is being saved: wait for its handle first");
  if (!job.relies.empty()) throw refused_change(job.relies.front() + ", which relies on the layout that there is");
  if (job.waits) throw refused_change("a checkpoint waits to be loaded when the model is cut: make a step first");
  if (job.has_hook)
    throw refused_change("the model has a communication hook, whose state may be made for these copies");
  if (job.joins) throw refused_change("copies of the model may have left in model.join(): call it after that");
  if (!job.odd_buffers.empty()) {
    throw refused_change(
        base::str("the buffer ", job.odd_buffers.front(), " is sparse or quantised, and cannot go to another rank"));
  }
  for (const auto& optimizer : job.optimizers) require_fits(optimizer, config, copies);
  if (config.tensor_parallel_degree == 1) return;
  if (const auto why = job.why_not_slices(config); !why.empty()) throw refused_change(why);
}

void require_changeable(Session& session, const config::Config& config, const ChangingJob& job) {
  const int copies = session.world().size / (config.partitions * config.tensor_parallel_degree);
  messaging::act_together(
      session.mailbox(), session.members(topology::Group::kWorld),
      [&] {
        require_fits(job, config, copies);
        if (session.config().tensor_parallel_degree > 1 && !job.is_cut) {
          throw refused_change("layers are sliced of a model that no step has cut yet: make a step first");
        }
      },
      session.patience());
}

bool waits_for_trace(Session& session, const config::Config& config, bool is_traced, bool is_whole) {
  const bool slices = config.tensor_parallel_degree > 1;  // of states, too, which are cut now
  const bool wants = config.partitions > 1 && config.auto_partition && !config.skip_tracing && !slices;
  const auto word = messaging::made_by_first(
      session.mailbox(), session.members(topology::Group::kWorld),
      [&]() -> value::Value { return wants && !is_traced && is_whole; }, session.patience());
  return word.as<bool>();
}

std::shared_ptr<Session> open_beside(Session& before, config::Config config, environment::World world, FaceHooks hooks,
                                     std::vector<base::Rank> members, std::string what) {
  // The hook stays with the new session, which looks at the old one while ranks meet only.
  const auto meeting = std::make_shared<bool>(true);
  hooks.check_interrupt = [&before, meeting, members = std::move(members), what = std::move(what),
                           inner = std::move(hooks.check_interrupt)] {
    if (inner) inner();
    if (!*meeting) return;
    if (const auto loss = before.mailbox().loss(members, std::chrono::milliseconds(0))) {
      throw base::PeerError(base::str(what, ": ", loss->text()), *loss, base::Code{"group-lost"});
    }
  };
  auto store = hosted_store(world, before.patience(), hooks.check_interrupt);
  const auto first = before.epochs().follows();
  auto session = std::make_shared<Session>(std::move(config), std::move(world), std::move(hooks), &first);
  session->when_closed([store] {});  // until then it is there
  *meeting = false;
  // The end of the session before is a loss to those who still look at it: that comes after all have met.
  session->mailbox().barrier(session->members(topology::Group::kWorld), session->patience());
  if (store != nullptr) store->forget_meetings();
  if (clips_as_shards(before)) session->clip_as_shards();
  session->note_asked(before.asked());
  session->job().seeds() = before.job().seeds();
  session->share_out_microbatches();
  return session;
}

std::shared_ptr<Session> open_after(Session& before, config::Config config, FaceHooks hooks) {
  auto session = open_beside(before, std::move(config), before.world(), std::move(hooks),
                             before.members(topology::Group::kWorld), "lamina.change()");
  session->note_asked(session->config());
  return session;
}

void put_aside(const model::ParameterTable& table, sharding::Sharding* sharding) {
  constexpr auto kWhy =
      " is on its way to another layout; it was used in lamina.change(): that call has failed, see its error";
  if (sharding != nullptr) sharding->let_go(kWhy);
  model::put_aside(table, kWhy);
}

void take_over(Session& session) {
  devices::watch_failures([&session](const std::string& what) { messaging::tell_failed(session.transport(), what); });
}

}  // namespace lamina::session
