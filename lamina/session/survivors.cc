// SPDX-License-Identifier: Apache-2.0
#include "lamina/session/survivors.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <set>
#include <typeinfo>
#include <utility>

#include "lamina/base/error.h"
#include "lamina/base/joined.h"
#include "lamina/base/log.h"
#include "lamina/base/str.h"
#include "lamina/messaging/agreement.h"
#include "lamina/rendezvous/place.h"
#include "lamina/session/newcomer.h"
#include "lamina/session/next_epoch.h"
#include "lamina/session/next_place.h"
#include "lamina/value/failure.h"

namespace lamina::session {
namespace {

using topology::Group;
using value::Tuple;
using value::Value;

constexpr auto kUntilHeard = std::chrono::seconds(2);  // how long a loss may take to be heard of here

std::vector<base::Rank> others(const Session& session) {
  auto ranks = session.members(Group::kWorld);
  std::erase(ranks, session.world().rank);
  return ranks;
}

std::string listed(const std::vector<base::Rank>& ranks) {
  std::string all;
  for (const auto rank : ranks) all += base::str(all.empty() ? "" : ", ", rank);
  return all;
}

std::string seconds_since(base::Clock::time_point begin) {
  std::array<char, 32> text{};
  const auto took = std::chrono::duration<double>(base::Clock::now() - begin).count();
  std::snprintf(text.data(), text.size(), "%.1f s", took);
  return text.data();
}

}  // namespace

Value to_value(const std::vector<Told>& told) {
  value::List list;
  for (const auto& each : told) list.items.emplace_back(Tuple{{each.progress, each.word}});
  return list;
}

std::vector<Told> to_told(const Value& value) {
  std::vector<Told> told;
  for (const auto& each : value.as<value::List>().items) {
    const auto& items = each.as<Tuple>().items;
    told.push_back({items.at(0).as<std::int64_t>(), items.at(1)});
  }
  return told;
}

bool is_of_loss(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const base::PeerError&) {
    return true;
  } catch (const base::DesyncError&) {  // of a wait for one that has heard of a loss before
    return true;
  } catch (const value::RemoteFailure& failure) {
    return failure.failure().type == c10::demangle(typeid(base::PeerError).name());
  } catch (...) {
    return false;
  }
}

std::string key_of_parts(const config::Config& config) {
  if (config.partitions > 1) return "partitions";
  if (config.tensor_parallel_degree > 1) return "tensor_parallel_degree";
  if (config.sharded_data_parallel_degree > 1) return "sharded_data_parallel_degree";
  return config.shard_optimizer_state ? "shard_optimizer_state" : "";
}

std::string why_no_survivors(const Session& session, bool keeps_parts) {
  const auto& config = session.asked();
  if (const auto parts = key_of_parts(config); !parts.empty() && !keeps_parts) {
    return base::str(parts, " gives ranks parts that no other one has, and that are lost with a rank");
  }
  if (session.topology().size(Group::kNode) < session.world().size && session.seats().empty()) {
    return "ranks of several machines know where others are under `lamina run --elastic` alone";
  }
  return config.ddp ? "" : "without ddp each rank trains by itself";
}

void tell_no_survivors(Session& session, const std::string& why) {
  const auto is_lost = [&](std::int64_t rank) {
    return session.mailbox().loss(std::array{base::Rank(rank)}, std::chrono::milliseconds(0)).has_value();
  };
  std::int64_t first = 0;
  while (first < session.world().rank.value && is_lost(first)) ++first;
  if (base::Rank(first) != session.world().rank) return;
  base::log_info("--elastic: a rank is lost, and the others end with it: " + why);
}

Survivors::Survivors(TrainingFace& face, SurvivorOptions options)
    : options_(std::move(options)),
      doorway_([this] {
        auto facts = options_.facts();
        facts.emplace_back("way to go on", way());
        return facts;
      }),
      face_(face) {}

bool Survivors::may_go_on() {
  const auto now = face_.session();
  if (now != nullptr && outlives_changes()) session_ = now;
  const bool is_known = now == session_;
  if (is_known && !session_->mailbox().loss(others(*session_), kUntilHeard)) return false;
  const auto why = is_known ? why_not(*session_) : kChangesLayout;
  if (why.empty()) return true;
  if (now != nullptr) tell_no_survivors(*now, why);
  return false;
}

bool Survivors::is_called() const {
  session_->epochs().look_after_witness();
  return false;
}

std::vector<Told> Survivors::go_on(bool is_lost) {
  while (true) {
    if (!since_) since_ = base::Clock::now();
    auto next = meet(is_lost);
    const auto session = next.session;
    try {
      auto told = session == nullptr ? std::move(next.told) : go_over(std::move(next));
      begin_epoch();
      return told;
    } catch (const base::Error&) {
      // Not when it is let go: its threads may wait for the face's lock then.
      if (session != nullptr && face_.session() != session) session->close(false);
      if (!is_of_loss(std::current_exception()) || !may_go_on()) throw;
      is_lost = true;
    }
  }
}

std::shared_ptr<Session> Survivors::open_after(config::Config config) {
  const auto before = face_.session();
  std::shared_ptr<Session> session;
  std::exception_ptr failure;
  try {
    session = session::open_after(*before, std::move(config), options_.hooks());
  } catch (const base::Error&) {
    failure = std::current_exception();
  }
  try {
    if (before->epochs().begins(session != nullptr)) return session;
  } catch (const base::Error&) {
    if (!failure) failure = std::current_exception();
  }
  if (session != nullptr) session->close(false);
  if (failure) std::rethrow_exception(failure);
  throw base::PeerError("lamina.change(): a rank is lost while the ranks meet", before->mailbox().first_loss(),
                        base::Code{"group-lost"});
}

void Survivors::begin_epoch() { doorway_.begin_epoch(*session_, why_not_so_many()); }

std::vector<Told> Survivors::join() {
  Newcomer newcomer(*session_, doorway_.facts());
  while (true) {
    const auto place = newcomer.wait();
    if (!place) {
      base::log_info("the job was over before this process could join it");
      throw ProcessEnds{};
    }
    const auto world = next_place(*session_, *place);
    take_place(world, place->epoch);
    Next next;
    try {
      next.session = newcomer.open(*session_, *place, world, options_.hooks());
    } catch (const base::PeerError&) {  // the others go on without this process, for now
      continue;
    }
    for (int rank = 0; rank < place->size; ++rank) next.told.push_back({.progress = rank < place->rank ? 0 : -1});
    try {
      return go_over(std::move(next));
    } catch (const base::Error&) {
      if (!is_of_loss(std::current_exception()) || !may_go_on()) throw;
      return go_on(/*is_lost=*/true);
    }
  }
}

void Survivors::take_place(const environment::World& place, std::int64_t epoch) {
  session::take_place(place, epoch);
  options_.note_place();
}

void Survivors::note(const NextEpoch& next) {
  const auto has = [](const auto& ranks, base::Rank rank) { return std::ranges::find(ranks, rank) != ranks.end(); };
  for (const auto rank : session_->members(Group::kWorld)) {
    if (!has(next.members, rank) && !has(next.leaving, rank) && !has(lost_, rank)) lost_.push_back(rank);
  }
  left_.insert(left_.end(), next.leaving.begin(), next.leaving.end());
  joined_ += static_cast<int>(next.newcomers.size());
}

void Survivors::leave(const NextEpoch& next) {
  if (next.members.empty()) face_.all_leave();
  doorway_.leave(!next.members.empty());
}

void Survivors::switch_to(const std::shared_ptr<Session>& session, const std::function<void()>& go_over) {
  try {
    go_over();
  } catch (...) {
    if (face_.session() == session) session_ = session;
    throw;
  }
  session_ = session;
}

void Survivors::tell_going_on(std::int64_t step, bool is_again) {
  const auto since = std::exchange(since_, std::nullopt).value_or(base::Clock::now());
  auto lost = std::exchange(lost_, {});
  const auto left = std::exchange(left_, {});
  const int joined = std::exchange(joined_, 0);
  auto& session = *face_.session();
  const auto hosts = std::exchange(session.lost_hosts(), {});
  if (session.world().rank != base::Rank(0) || (lost.empty() && left.empty() && joined == 0)) return;
  const int size = session.world().size, partitions = session.config().partitions;
  const auto now = base::str(size, size > 1 ? " ranks, " : " rank, ",
                             partitions > 1 ? base::str("partitions ", partitions, " x ") : "", "copies ",
                             session.topology().size(Group::kReplicas));
  const auto took = seconds_since(since);
  if (!lost.empty()) {
    std::ranges::sort(lost);
    const auto machines = std::set(hosts.begin(), hosts.end());
    base::log_info(base::str("lost rank", lost.size() > 1 ? "s " : " ", listed(lost),
                             machines.size() > 1 ? " (machines " : " (machine ",
                             machines.empty() ? rendezvous::host_name() : base::joined(machines), ") in step ", step,
                             ": ", now, "; step ", step, is_again ? " again, " : " is done, ", took));
    return;
  }
  std::string came, went;
  if (joined > 0) came = base::str(joined, joined > 1 ? " ranks have joined" : " rank has joined");
  if (!left.empty()) went = base::str("rank ", listed(left), left.size() > 1 ? " have left" : " has left");
  base::log_info(
      base::str(went, went.empty() || came.empty() ? "" : " and ", came, " before step ", step, ": ", now, "; ", took));
}

CopySurvivors::CopySurvivors(CopiesFace& face, SurvivorOptions options)
    : Survivors(face, std::move(options)), face_(face) {
  keep();
}

std::string CopySurvivors::why_not(const Session& session) const { return why_no_survivors(session); }

void CopySurvivors::keep() {
  session_ = face_.session();
  if (!why_not(*session_).empty()) return;
  std::map<std::string, Kept> before;
  before.swap(kept_);
  for (const auto& [name, buffer] : face_.buffers()) {
    const auto version = static_cast<std::int64_t>(buffer._version());
    const auto found = before.find(name);
    const bool is_kept =
        found != before.end() && found->second.buffer.is_same(buffer) && found->second.version == version;
    kept_.emplace(name, is_kept ? std::move(found->second) : Kept{buffer, buffer.detach().clone(), version});
  }
  seeded_ = session_->job().seeds().steps();
}

std::optional<std::vector<Told>> CopySurvivors::begin() {
  if (!why_not(*session_).empty()) return std::nullopt;
  doorway_.begin();
  std::optional<std::vector<Told>> told;
  if (environment::is_newcomer()) {
    is_whole_ = false;  // until it has what the first one has
    told = join();
  }
  begin_epoch();
  return told;
}

std::function<std::string(int)> CopySurvivors::why_not_so_many() {
  return [](int) { return std::string(); };
}

NextEpoch CopySurvivors::agree(EpochEnd& end, bool leaves) {
  const FreePort port(*session_);
  const Value word = Tuple{{face_.progress(), std::int64_t{port.number()}, face_.word()}};
  return end.next(word, is_whole_ ? face_.progress() : -1, leaves);
}

Survivors::Next CopySurvivors::meet(bool is_lost) {
  EpochEnd end(*session_, doorway_.door());
  const auto epochs = epoch_of_environment();
  while (true) {
    const bool leaves = !is_lost && doorway_.leaves();
    const auto next = agree(end, leaves);
    if (leaves && !end.may_leave(next)) continue;
    if (leaves) leave(next);
    const auto said = [&](std::size_t place, std::size_t item) -> const Value& {
      return next.words[place].as<Tuple>().items.at(item);
    };
    Next result;
    for (std::size_t place = 0; place < next.words.size(); ++place) {
      result.told.push_back({said(place, 0).as<std::int64_t>(), said(place, 2)});
    }
    const int size = session_->world().size;
    if (!is_lost && next.number == 1 && next.newcomers.empty() && std::ssize(next.members) == size) {
      return result;  // the newcomers have gone again
    }
    face_.end_saves(is_lost);
    if (!is_whole_ && next.rank == 0) {
      throw base::PeerError("the states of all that are left were lost with those who had them", {},
                            base::Code{"elastic-ended"});
    }
    const auto epoch = epochs + next.number;
    const auto world = next_place(*session_, next, static_cast<int>(said(0, 1).as<std::int64_t>()));
    take_place(world, epoch);
    try {
      result.session = end.open(next, world, epoch, options_.hooks());
    } catch (const base::PeerError&) {
      continue;  // they agree anew
    }
    note(next);
    result.told.resize(static_cast<std::size_t>(next.size()));
    return result;
  }
}

std::vector<Told> CopySurvivors::go_over(Next next) {
  auto told = std::move(next.told);
  {
    const at::NoGradGuard no_grad;
    for (const auto& [name, buffer] : face_.buffers()) {
      if (const auto kept = kept_.find(name); kept != kept_.end()) at::Tensor(buffer).copy_(kept->second.value);
    }
  }
  const auto first = told.front().progress;
  is_whole_ = told[static_cast<std::size_t>(next.session->world().rank.value)].progress == first;
  switch_to(next.session, [&] { face_.go_over(next.session); });
  if (std::ranges::all_of(told, [&](const Told& each) { return each.progress == first; })) {
    face_.take(nullptr);
  } else {
    const auto given = messaging::made_by_first(
        session_->mailbox(), session_->members(Group::kWorld),
        [&]() -> Value {
          const auto seeded = seeded_ ? Value(static_cast<std::int64_t>(*seeded_)) : Value();
          return Tuple{{face_.states(), seeded, to_value(told)}};
        },
        session_->patience());
    const auto& items = given.as<Tuple>().items;
    face_.take(&items.at(0));
    seeded_.reset();
    if (const auto* seeded = items.at(1).get_if<std::int64_t>()) seeded_ = static_cast<std::uint64_t>(*seeded);
    told = to_told(items.at(2));
  }
  if (seeded_) session_->job().seeds().go_on_after(*seeded_);
  is_whole_ = true;
  keep();
  return told;
}

}  // namespace lamina::session
